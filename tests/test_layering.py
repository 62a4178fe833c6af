"""The house rules, read from the imports: arrows point down, private JAX and torch in their rooms, short files."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("jremat", "policies", "models", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
# What each room may import of ours, besides itself. `models` and `policies` never meet: a model is given its policy.
ALLOWED = {
    "jremat.policy": set(),
    "jremat.estimate": {"jremat.policy", "jremat.graph", "jremat.transform"},
    "jremat.graph": {"jremat.policy"},
    "jremat.transform": {"jremat.policy", "jremat.graph"},
    "jremat.measure": {"jremat.policy", "jremat.graph", "jremat.estimate"},
    "jremat.plan": {"jremat.policy", "jremat.graph", "jremat.estimate", "jremat.transform", "jremat.measure"},
    "jremat.check": {
        "jremat.policy",
        "jremat.graph",
        "jremat.estimate",
        "jremat.transform",
        "jremat.measure",
        "jremat.plan",
    },
    "jremat.report": {"jremat.policy", "jremat.graph", "jremat.estimate", "jremat.transform"},
    "jremat.command": {  # what is installed beside the library: the one room of jremat that reads specs
        "jremat",
        "policies",
        "jremat.policy",
        "jremat.graph",
        "jremat.estimate",
        "jremat.transform",
        "jremat.measure",
        "jremat.plan",
        "jremat.check",
        "jremat.report",
    },
    "policies": {"jremat.policy", "jremat.estimate"},
    "models": {"jremat.policy", "jremat.estimate"},
}
# A request is data, its fulfilment the planner's: the one arrow that points up. Every command ends as
# `jremat.command.line` has it, and prints its tables as `jremat.report.tables` does.
EXCEPTIONS = {
    ("jremat/policy/layers.py", "jremat.plan"),
    ("policies/__main__.py", "jremat.command"),
    ("policies/__main__.py", "jremat.report"),
    ("policies/dictionaries/markdown.py", "jremat.command"),
}
# Where torch may be: the twin, the contexts that run policies (what they say is data without it) and the comparison.
TORCH = re.compile(r"(models/torch_\w+|policies/torch_contexts|scripts/compare_torch|scripts/compare/torch_\w+)\.py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its head or inside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(module: str) -> str | None:
    """The room that a module or a file stands in, if it is one of ours."""
    head, *rest = module.split(".")
    if head == "jremat":
        return f"jremat.{rest[0]}" if rest and (ROOT / "jremat" / rest[0]).is_dir() else "jremat"
    return head if head in ("policies", "models", "scripts") else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path):
    name = str(path.relative_to(ROOT))
    modules = imports(path)
    if name != "jremat/graph/trace.py":
        private = {m for m in modules if m == "jax._src" or m.startswith(("jax._src.", "jaxlib."))}
        assert not private, "private JAX belongs in jremat/graph/trace.py"
    if not TORCH.fullmatch(name):
        assert not {m for m in modules if m.split(".")[0] == "torch"}, "torch is optional, and has its own files"
    here = room(name.removesuffix(".py").replace("/", "."))
    if here in ALLOWED:
        for module in modules:
            there = None if module.startswith("jremat.callable_package") else room(module)  # Python's matter, no room's
            if there is None or there == here or (name, there) in EXCEPTIONS:
                continue
            assert there in ALLOWED[here], f"{here} may not import {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_read_at_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 600


def test_no_room_is_missing_from_the_rules():
    rooms = {room(f"jremat.{folder.name}") for folder in (ROOT / "jremat").iterdir() if any(folder.glob("*.py"))}
    assert rooms - {"jremat", None} <= set(ALLOWED)
