"""Every public name says what it is in one sentence, and what is exported says all that a caller must know."""

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jremat
import policies

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("jremat", "policies", "models") for path in (ROOT / package).rglob("*.py"))

SOURCES = {
    "jremat.checkpoint": "Chen et al. 2016",
    "jremat.estimator.textbook.layer_bytes": "Korthikanti et al. 2022",
    "jremat.graph.order": "XLA",
    "jremat.graph.siblings": "XLA",
    "jremat.plan": "Jain et al. 2020",
    "jremat.planner.baselines.fixed_order": "MaxText",
    "jremat.planner.baselines.greedy": "PyTorch",
    "jremat.planner.baselines.greedy_knapsack": "PyTorch",
    "jremat.planner.baselines.knapsack": "PyTorch",
    "jremat.planner.block": "Jain et al. 2020",
    "jremat.planner.cut": "Picard 1976",
    "jremat.planner.roofline.Roofline": "Williams et al. 2009",
    "jremat.stack": "Griewank and Walther 2000",
    "jremat.predicted_memory": "Aho et al. 2006",
    "jremat.transform.groups.best_group": "Chen et al. 2016",
    "jremat.transform.revolve.binomial": "Griewank and Walther 2000",
    "jremat.transform.revolve.binomial_steps": "Griewank and Walther 2000",
    "jremat.estimator.decoder.attention.blockwise": "Dao et al. 2022",
    "jremat.estimator.decoder.attention.dot": "Vaswani et al. 2017",
    "jremat.estimator.decoder.layers.dropout": "Srivastava et al. 2014",
    "jremat.estimator.decoder.layers.gelu": "Hendrycks and Gimpel 2016",
    "jremat.estimator.decoder.layers.layer_norm": "Ba et al. 2016",
    "jremat.estimator.decoder.layers.rms_norm": "Zhang and Sennrich 2019",
    "jremat.estimator.decoder.layers.rope": "Su et al. 2021",
    "jremat.estimator.decoder.layers.silu": "Elfwing et al. 2017",
    "jremat.estimator.decoder.layers.swiglu": "Shazeer 2020",
}
"""What is made after a paper or another system's code, with what its ``Source:`` names."""


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Functions, classes and methods that are reached without an underscore."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def fault_of_summary(text: str | None) -> str | None:
    """What is wrong with a docstring's first line, or None."""
    if not text:
        return "no docstring"
    first = text.strip().splitlines()[0]
    if not first.endswith((".", "?")):
        return f"the first line ends inside a sentence: {first!r}"
    if re.search(r"[.?] +[A-Z`]", first):
        return f"the first line is more than one sentence: {first!r}"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_says_in_one_sentence_what_it_is(path):
    tree = ast.parse(path.read_text())
    named = [("the module", tree), *public(tree)]
    faults = {name: fault_of_summary(ast.get_docstring(node)) for name, node in named}
    assert not {name: fault for name, fault in faults.items() if fault}


def raises_unsaid(node: ast.AST) -> bool:
    """Whether a function raises something of its own and its docstring doesn't say so."""
    if not isinstance(node, ast.FunctionDef) or node.name == "main":  # which catches what it raises
        return False
    raised = any(isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call) for inner in ast.walk(node))
    return raised and not re.search(r"\bRaises?\b|\w+Error\b", ast.get_docstring(node) or "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_raises_says_so(path):
    assert not [name for name, node in public(ast.parse(path.read_text())) if raises_unsaid(node)]


def face(name: str) -> Any:
    """What is exported under ``package.name``."""
    package, _, own = name.partition(".")
    return getattr(importlib.import_module(package), own)


EXPORTED = [f"{package.__name__}.{name}" for package in (jremat, policies) for name in package.__all__]
FACES = [name for name in EXPORTED if inspect.isfunction(face(name)) or inspect.isclass(face(name))]


def section(text: str, *headings: str) -> str:
    """The indented lines under one of the headings; empty where there is none."""
    found = re.search(rf"^(?:{'|'.join(headings)}):\n((?:(?: +.*)?(?:\n|$))+)", text, re.MULTILINE)
    return found[1] if found else ""


def faults_of_face(thing: Callable[..., Any]) -> list[str]:
    """What the docstring of an exported function or class lacks."""
    text = inspect.getdoc(thing) or ""
    faults = ["no doctest"] * (">>>" not in text)
    is_enum = inspect.isclass(thing) and issubclass(thing, enum.Enum)
    parameters = () if is_enum else inspect.signature(thing).parameters
    told = re.findall(r"^ +((?:\w+, )*\w+):", section(text, "Args", "Attributes"), re.MULTILINE)
    named = {name for line in told for name in line.split(", ")}
    faults += [f"Args: nothing of {name}" for name in parameters if name not in named]
    returns = inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in (None, "None")
    if returns and parameters and not section(text, "Returns"):
        faults.append("no Returns")
    raises = thing if inspect.isfunction(thing) else vars(thing).get("__post_init__")
    if raises and re.search(r"^ +raise \w+\(", inspect.getsource(raises), re.MULTILINE) and not section(text, "Raises"):
        faults.append("no Raises")
    return faults


@pytest.mark.parametrize("name", FACES)
def test_what_is_exported_says_what_it_takes_returns_and_raises_and_shows_it(name):
    assert faults_of_face(face(name)) == []


def test_data_that_is_exported_is_said_to_be_so():
    data = {name: face(name) for name in EXPORTED if name not in FACES}
    assert set(data) == {"jremat.FAMILIES", "jremat.FULL", "jremat.NONE", "policies.PolicyLike"}


@pytest.mark.parametrize("name", SOURCES)
def test_an_algorithm_names_its_source(name):
    if name in FACES:
        text = inspect.getdoc(face(name))
    else:
        try:
            text = importlib.import_module(name).__doc__
        except ModuleNotFoundError:
            module, _, own = name.rpartition(".")
            text = inspect.getdoc(getattr(importlib.import_module(module), own))
    assert text is not None
    [source] = re.findall(r"^Source: ((?:.+\n?)+)", text, re.MULTILINE)
    assert SOURCES[name] in " ".join(source.split())


# -- That the tests above can fail ----------------------------------------------------------------------------


def _silent(x: int) -> int:
    raise ValueError(x)


def _half(x: int, y: int) -> int:
    """A sentence.

    Args:
        x: a number.

    >>> 1
    1
    """
    return x + y


def test_a_docstring_without_its_parts_is_found():
    assert faults_of_face(_silent) == ["no doctest", "Args: nothing of x", "no Returns", "no Raises"]
    assert faults_of_face(_half) == ["Args: nothing of y", "no Returns"]


@pytest.mark.parametrize("text", [None, "", "Half a", "One. And another.", "Ends\nlater."])
def test_a_first_line_that_is_no_sentence_is_found(text):
    assert fault_of_summary(text)


def test_an_error_that_no_docstring_speaks_of_is_found():
    silent, said = ast.parse(
        "def f(x):\n  'One.'\n  raise ValueError(x)\ndef g(x):\n  'One, or a ValueError.'\n  raise ValueError(x)"
    ).body
    assert raises_unsaid(silent) and not raises_unsaid(said)


def test_hidden_names_are_left_alone():
    tree = ast.parse("class A:\n  def b(self): ...\n  def _c(self): ...\nclass _D:\n  def e(self): ...")
    assert [name for name, _ in public(tree)] == ["A", "A.b"]
