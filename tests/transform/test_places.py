"""Policies by module path and by line, on a Llama without tags: what is kept and what is recomputed, counted."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jremat
import policies
from tests.transform import llamas
from tests.transform.llamas import ARRAY, LAYERS, X

LINEN = llamas.Llama()
VARIABLES = jax.eval_shape(LINEN.init, jax.random.key(0), X)
NNX = llamas.NnxLlama(nnx.Rngs(0))


def linen_loss(variables, x):
    return jnp.sum(LINEN.apply(variables, x) ** 2)


def nnx_loss(model, x):
    return jnp.sum(model(x) ** 2)


MODELS = {"linen": (linen_loss, VARIABLES), "nnx": (nnx_loss, NNX)}


def counted(loss, model, policy):
    """Bytes kept, and matmuls recomputed."""
    kept = jremat.residuals(loss, model, X, policy=policy).total_bytes
    return kept, jremat.flops(jax.grad(jremat.remat(loss, policy)), model, X).count.recompute


INNER = ARRAY * llamas.INNER // llamas.WIDTH
SCORES = 4 * X.shape[0] * llamas.HEADS * X.shape[1] ** 2
# q, k, v, context, o_proj's result (the MLP's recompute starts from it); of softmax exp, its sum, the quotient.
ATTENTION = 5 * ARRAY + 2 * SCORES + SCORES // X.shape[1]
# gate, up, sigmoid, silu, their product; down_proj's result.
MLP = 5 * INNER + ARRAY


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("spec", "kept", "matmuls"),  # of 9 in a layer
    [
        ("save:*/attn/*", ATTENTION, 3),
        ("save:*/mlp/*", MLP, 6),
        ("save:*/gate_proj/*", INNER, 8),
        ("save:*/gate_proj/*,*/up_proj/*", 2 * INNER, 7),
        ("save:*/mlp/*;but:*/mlp/up_proj/*", MLP - INNER, 7),
    ],
)
def test_a_path_keeps_what_its_modules_make(kind, spec, kept, matmuls):
    assert counted(*MODELS[kind], policies.get(spec)) == (LAYERS * kept, LAYERS * matmuls)


@pytest.mark.parametrize("kind", MODELS)
def test_a_path_to_recompute_leaves_the_rest_kept(kind):
    kept, again = counted(*MODELS[kind], policies.get("recompute:*/mlp/*"))
    assert again == 2 * LAYERS  # gate and up: down's result is in the residual stream, which the next norm reads
    plain = jremat.residuals(*MODELS[kind], X)
    assert kept < plain.total_bytes - LAYERS * 3 * INNER
    assert not [
        row for row in jremat.residuals(*MODELS[kind], X, policy=policies.get("but:*/mlp/*")) if "/mlp" in row.path
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_one_layer_by_its_path(kind):
    layer = {"linen": "layers_1/*", "nnx": "layers/1/*"}[kind]
    _, again = counted(*MODELS[kind], policies.get(f"save:{layer}"))
    assert again == 9 * (LAYERS - 1)
    inside = "*" + layer
    assert counted(*MODELS[kind], policies.get(f"save:{inside}")) == counted(
        *MODELS[kind], policies.get(f"save:{layer}")
    )


def test_rules_hold_in_any_order():
    assert policies.get("but:*/mlp/up_proj/*;save:*/mlp/*") == policies.get("save:*/mlp/*;but:*/mlp/up_proj/*")


def line_of(text):
    lines, first = inspect.getsourcelines(llamas)
    return next(k for k, line in enumerate(lines, first + 1) if text in line)


@pytest.mark.parametrize("kind", MODELS)
def test_a_line_keeps_what_it_makes(kind):
    at = policies.get(f"at:llamas.py:{line_of('probs = jax.nn.softmax')}")
    line = at.names[0][0]
    assert at == policies.get(f"save:{line}") and str(at) == f"at:{line}"
    kept = jremat.residuals(*MODELS[kind], X, policy=at)
    assert {row.source.partition(" ")[0] for row in kept.kept} == {line}
    assert counted(*MODELS[kind], at)[1] == counted(*MODELS[kind], jremat.FULL)[1] - LAYERS  # the scores


def test_offload_by_path():
    found = jremat.residuals(linen_loss, VARIABLES, X, policy=policies.get("offload:*/gate_proj/*;save:*/up_proj/*"))
    assert found.host_bytes == found.device_bytes == LAYERS * INNER


def test_as_a_class_of_a_block_and_gradients_are_equal():
    policy = policies.get("save:*/attn/*")
    variables = LINEN.init(jax.random.key(0), X)
    block, rematted = llamas.Block(), jremat.remat(llamas.Block, policy)()
    own = {"params": variables["params"]["layers_0"]}
    grad = lambda module: jax.grad(lambda v: jnp.sum(module.apply(v, X) ** 2))(own)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5, atol=1e-5), grad(block), grad(rematted))
    )
    kept = jremat.residuals(rematted.apply, own, X)
    assert kept.total_bytes == ATTENTION
    plain = llamas.NnxBlock(nnx.Rngs(0))
    cls = jremat.remat(llamas.NnxBlock, policy)
    assert jremat.residuals(lambda m: cls.__call__(m, X), plain).total_bytes == kept.total_bytes
    assert type(plain.attn) is llamas.NnxAttention  # named only while it is traced


def test_in_a_stack_and_under_nn_scan():
    policy = policies.get("save:*/attn/*")
    own = {"params": LINEN.init(jax.random.key(0), X)["params"]["layers_0"]}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAYERS), own)
    block = lambda layer, x: llamas.Block().apply(layer, x)
    run = jremat.stack(block, policy, num_layers=LAYERS)
    again = jremat.flops(jax.grad(lambda w: jnp.sum(run(w, X) ** 2)), stacked).count.recompute
    assert again == 3 * LAYERS - LAYERS  # the body is one: its last matmul is in no layer recomputed

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = jremat.remat(llamas.Block, policy, prevent_cse=False)
            body = nn.scan(
                lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return body(layer(name="layers"), x, None)[0]

    variables = jax.eval_shape(Scanned().init, jax.random.key(0), X)
    again = jremat.flops(jax.grad(lambda v: jnp.sum(Scanned().apply(v, X) ** 2)), variables).count.recompute
    assert again == 3 * LAYERS - LAYERS


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("save:*/atn/*", r"names '\*/atn/\*', where no value is made \(did you mean '\*/attn/\*'\?\); paths"),
        ("save:encoder/*", r"paths in this function: Llama/layers_\*/norm1, Llama/layers_\*/attn/q_proj"),
        ("at:llamas.py:1", r"names 'llamas.py:1', where no value is made; lines that make values: llamas.py:\d\d"),
        ("at:lamas.py:1", r"did you mean 'llamas.py:"),
    ],
)
def test_a_place_that_matches_nothing_raises(spec, message):
    with pytest.raises(ValueError, match=message):
        jremat.residuals(linen_loss, VARIABLES, X, policy=policies.get(spec))
    findings = jremat.lint(linen_loss, VARIABLES, X, policy=policies.get(spec))
    assert any(f.rule == "unknown-name" and "where no value is made" in f.message for f in findings)


def test_optional_places_may_match_nothing():
    policy = policies.get("save:*/attn/*,*/cross/*?")
    assert counted(linen_loss, VARIABLES, policy) == counted(linen_loss, VARIABLES, policies.get("save:*/attn/*"))


def test_a_plain_jax_policy_refuses_places():
    with pytest.raises(
        ValueError, match=r"selects by place \(\*/attn/\*\), which a plain JAX policy can't; use jremat"
    ):
        jax.make_jaxpr(jax.grad(jax.checkpoint(linen_loss, policy=policies.get("save:*/attn/*"))))(VARIABLES, X)


@pytest.mark.parametrize("spec", ["save:*", "save:*/*", "at:attn", "save:a:b", "save:*/a b/*"])
def test_malformed_places(spec):
    with pytest.raises(ValueError, match="expected"):
        policies.get(spec)


@pytest.mark.parametrize(
    "spec",
    ["save:*/attn/*", "mix:2*save:*/attn/*,rest*full", "every_k:2,save:*/attn/*+x", "offload:m.py:4;but:*/mlp/*"],
)
def test_specs_print_back(spec):
    policy = policies.get(spec)
    assert str(policy) == spec and policies.get(str(policy)) == policy
    if isinstance(policy, jremat.Policy):
        assert policies.get(policy.canonical_spec) == policy


@pytest.mark.parametrize("kind", MODELS)
def test_explain_shows_paths_that_select(kind):
    loss, model = MODELS[kind]
    found = jremat.explain(loss, model, X, policy=policies.get("save:*/attn/*"))
    kept = [row for row in found.of("kept") if "/attn" in row.path]
    assert kept and all(row.why == "in */attn/*" for row in kept)
    gates = [row for row in found.of("recomputed") if row.path.endswith("/gate_proj")]
    assert gates
    policy = policies.get(f"save:{gates[0].path}")  # as it is shown
    assert jremat.residuals(loss, model, X, policy=policy).total_bytes >= gates[0].bytes
