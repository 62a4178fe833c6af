"""The house rules, read from the imports: arrows point down, private JAX and torch in their rooms, short files."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("jremat", "policies", "models", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
# What each folder may import of ours, besides itself; a file that stands in no folder is its own. `models` and
# `policies` never meet: a model is given its policy.
_MODEL = {"jremat.jax_internals", "jremat.calibration", "jremat.policy", "jremat.graph", "jremat.estimator"}
ALLOWED: dict[str, set[str]] = {
    "jremat.quiet_cuda": set(),
    "jremat.child_process": set(),
    "jremat.jax_internals": set(),
    "jremat.calibration": set(),
    "jremat.policy": {"jremat.jax_internals"},
    "jremat.graph": {"jremat.policy", "jremat.jax_internals", "jremat.calibration"},
    "jremat.transform": {"jremat.policy", "jremat.graph", "jremat.jax_internals"},
    "jremat.estimator": {
        "jremat.jax_internals",
        "jremat.calibration",
        "jremat.policy",
        "jremat.graph",
        "jremat.transform",
    },
    "jremat.measure": {*_MODEL, "jremat.child_process"},
    "jremat.terminal": {"jremat.policy", "jremat.quiet_cuda"},
    "jremat.planner": {*_MODEL, "jremat.transform", "jremat.measure"},
    "jremat.fitting": {*_MODEL, "jremat.transform", "jremat.measure", "jremat.planner"},
    "jremat.check": {*_MODEL, "jremat.transform", "jremat.measure", "jremat.planner"},
    "jremat.oom": {*_MODEL, "jremat.transform", "jremat.measure", "jremat.fitting"},
    "jremat.report": {*_MODEL, "jremat.transform", "jremat.terminal"},
    "jremat": {*_MODEL, "jremat.transform", "jremat.measure", "jremat.planner", "jremat.check", "jremat.report"}
    | {"jremat.quiet_cuda", "jremat.fitting", "jremat.oom", "jremat.apply_to_model"},
    "jremat.apply_to_model": {"jremat.policy", "jremat.graph", "jremat.transform", "policies"},
    "policies": {"jremat.jax_internals", "jremat.policy", "jremat.estimator", "jremat.planner", "jremat.terminal"},
    "models": {"jremat.policy", "jremat.estimator", "jremat.transform"},
}
ALLOWED["jremat.command"] = {"jremat", *ALLOWED["jremat"], "jremat.terminal", "policies"}
ALLOWED["jremat.__main__"] = {"jremat.command", "jremat.terminal", "jremat.policy"}
ALLOWED["scripts"] = {*ALLOWED, "models", "policies"}
ALLOWED["benchmarks"] = {*ALLOWED, "scripts"}
INTERNALS = "jremat/jax_internals.py"
# What only that file may spell: names that JAX does not promise. Tables of what operations do are data.
UNPROMISED = {"rematted_computation", "transpose(", "jvp(", "_prim", "remat2", "custom_jvp_call", "custom_vjp_call"} | {
    *("pallas_call", "shard_map", "closed_call", "dim_as_value", "CheckpointName", "RematTraced", "Offloadable"),
    *("RecomputeType", "UnspecifiedValue", "jax_remat3", "num_carry", "fwd_jaxpr_thunk"),
}
TABLES = {"jremat/policy/ops.py", "jremat/graph/rules.py"}
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


def folder_of(module: str) -> str | None:
    """The folder that a module stands in, or the file that stands in none, if it is one of ours."""
    head, *rest = module.split(".")
    if head == "jremat":
        stands = rest and ((ROOT / "jremat" / rest[0]).is_dir() or (ROOT / "jremat" / f"{rest[0]}.py").exists())
        return f"jremat.{rest[0]}" if stands and rest[0] != "__init__" else "jremat"
    return head if head in ("policies", "models", "scripts", "benchmarks") else None


def file_of(module: str) -> Path | None:
    """The file of a module, if it is one of ours."""
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found in SOURCES), None)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path):
    name = str(path.relative_to(ROOT))
    modules = imports(path)
    if name != INTERNALS:
        private = {m for m in modules if m.startswith(("jax._src", "jaxlib", "flax.core", "flax.linen.transforms"))}
        assert not private, f"private JAX and Flax belong in {INTERNALS}"
    if not TORCH.fullmatch(name):
        assert not {m for m in modules if m.split(".")[0] == "torch"}, "torch is optional, and has its own files"
    here = folder_of(name.removesuffix(".py").replace("/", "."))
    for module in modules:
        there = folder_of(module)
        assert there in (None, here) or there in ALLOWED[here], f"{here} may not import {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "jremat").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_jax_does_not_promise_stands_in_one_file(path):
    if str(path.relative_to(ROOT)) not in {INTERNALS, *TABLES}:
        words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not words & UNPROMISED, f"belongs in {INTERNALS}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_read_at_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 600


def test_no_folder_is_missing_from_the_rules_and_the_rules_hold_no_circle():
    assert {folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in SOURCES} == set(ALLOWED)
    graphlib.TopologicalSorter(ALLOWED).prepare()  # raises where there is one


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count too; a submodule is not its package's own file."""
    arrows = {}
    for path in SOURCES:
        modules = imports(path)
        names = {name for module in modules if file_of(module) for name in modules if name.startswith(f"{module}.")}
        packages = {name.rpartition(".")[0] for name in names if file_of(name)}
        taken = {name.rpartition(".")[0] for name in names if not file_of(name)}
        arrows[path] = {file_of(module) for module in modules if module not in packages - taken} - {None, path}
    graphlib.TopologicalSorter(arrows).prepare()
