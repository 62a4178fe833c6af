"""``jremat fit``: a plan for a function of one's own, printed and written; one line for every mistake."""

import json
import sys

import jax.numpy as jnp
import pytest

import jremat
from jremat.__main__ import main

MODULE = """
import flax.linen as nn
import jax, jax.numpy as jnp

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(12):
            x = jnp.tanh(nn.Dense(512, name=f"layers_{k}")(x))
        return jnp.mean(x)

def loss(params, x):
    return Net().apply(params, x)

def subject():
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    return loss, (jax.eval_shape(Net().init, jax.random.key(0), x), x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_fit.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine_for_fit", None)


FIT = ("fit", "mine_for_fit:subject", "--target", "cpu", "--compiles", "0", "--hbm")


def test_prints_and_writes_a_plan_that_holds_for_its_program(folder, capsys):
    import mine_for_fit

    f, args = mine_for_fit.subject()
    as_it_is = jremat.fit(f, *args, hbm_bytes="1GiB", target="cpu", compiles=0).plan.predicted_peak_bytes
    budget = f"{as_it_is * 0.8 / 2**10:.0f}KiB"  # some layers must be rematted

    files = ("--out", "plan.json", "--html", "page.html", "--picture", "pictures")
    assert main([*FIT, budget, *files]) == 0
    printed = capsys.readouterr().out
    assert "layers_0" in printed and "mine_for_fit.py:9" in printed and "plan.json" in printed
    assert "layers_11" in (folder / "page.html").read_text()
    assert (folder / "pictures" / "frontier.svg").stat().st_size > 1000

    fitted = jremat.fit(f, *args, plan=folder / "plan.json")
    assert fitted.plan.predicted_peak_bytes <= 0.8 * as_it_is
    written = json.loads((folder / "plan.json").read_text())["segments"]
    assert sum(s.end - s.start for s in fitted.plan.segments) == written[-1]["end"]
    assert jremat.residuals(fitted, *args).total_bytes < jremat.residuals(f, *args).total_bytes

    changed = lambda params, x: f(params, jnp.sin(x))
    with pytest.raises(
        ValueError, match=r"^plan: .* the first operation that differs is sin to float32\[8192, 512\] at "
    ):
        jremat.fit(changed, *args, plan=folder / "plan.json")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*FIT, "1MiB"), "hbm_bytes: nothing fits in"),
        ((*FIT, "4"), "size: expected a number and a unit"),
        ((*FIT, "4MiB", "--out", "missing/plan.json"), "out: no such folder"),
        (("fit", "mine_for_fit:loss", "--hbm", "1GiB"), "args: mine_for_fit:loss takes params, x"),
        (("fit", "mine_for_fit:los", "--hbm", "1GiB"), "did you mean 'loss'?"),
    ],
)
def test_mistakes_are_a_line(folder, capsys, argv, message):
    assert main(list(argv)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in error if line.startswith("jremat fit: error: ")]) == 1 and message in " ".join(error)
