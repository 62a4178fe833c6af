"""``python -m policies.dictionaries docs/from-*.md`` makes anew the tables of the pages for users of other systems.

The words of a page are the page's own; the tables below are made from the zoo and from the translations, and found in a
page by their headings.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jremat.policy.files import write_whole
from jremat.terminal.command_line import run
from policies import registry
from policies.costs import Attention, Family, cost
from policies.entry import Entry
from policies.megatron import MODULES
from policies.torch_expression import NotExpressible, line_of
from policies.translate_maxtext import NAMES, PLACES, from_maxtext
from policies.translate_megatron import OFFLOAD_INPUTS, from_megatron

PROGRAM = "policies.dictionaries"
Rows = Iterator[tuple[str, ...]]

_FULL, _SELECTIVE = "--recompute-granularity full --recompute-method", "--recompute-granularity selective"
MEGATRON_LINES = (
    ("", "everything stays"),
    ("--recompute-activations", ""),
    (_SELECTIVE, "core_attn is the default of both"),
    (f"{_SELECTIVE} --recompute-modules layernorm mlp", "both leave out their tensors"),
    ("--recompute-activations --use-flash-attn", ""),
    ("--recompute-activations --attention-backend fused", ""),
    (f"{_FULL} uniform --recompute-num-layers 1", ""),
    (f"{_FULL} uniform --recompute-num-layers 4", "a last group of fewer layers is handled"),
    (f"{_FULL} block --recompute-num-layers 12", "of one stage"),
    (f"{_FULL} block --recompute-num-layers 3 --pipeline-model-parallel-size 2", ""),
    (f"{_FULL} block --recompute-num-layers 3 --pipeline-model-parallel-size 2 --num-layers 8", ""),
    (f"{_FULL} block --recompute-num-layers 1 --num-layers-per-virtual-pipeline-stage 2", ""),
    (f"{_FULL} block --recompute-num-layers 1 --num-virtual-stages-per-pipeline-rank 2", ""),
    (f"{_FULL} uniform --recompute-num-layers 2 --distribute-saved-activations", ""),
    ("--fine-grained-activation-offloading --offload-modules qkv_linear core_attn", "to pinned host memory"),
    (
        f"{_SELECTIVE} --recompute-modules mlp --fine-grained-activation-offloading --offload-modules attn_proj",
        "left out, offloaded and kept stand beside each other in one policy",
    ),
    ("--cpu-offloading --cpu-offloading-num-layers 2", ""),
)
"""Command lines, with what differs beyond the notes of their translation."""
DISCARDS_OUTPUT = frozenset({"layernorm", "moe_act", "mla_up_proj"})
"""Megatron-core's CheckpointWithoutOutput; its other modules are plain checkpoints."""


def _pytorch() -> Rows:
    for entry in registry.table():
        spec = code(entry.policy.spec) + (f", of the form {code(entry.spec)}" if entry.is_form else "")
        try:
            line, differs = line_of(entry.policy)
            yield code(line), spec, differs or "nothing"
        except NotExpressible as error:
            yield "not expressible", spec, str(error)


def _megatron_flags() -> Rows:
    for arguments, differs in MEGATRON_LINES:
        found = from_megatron(arguments)
        notes = "; ".join((*found.notes, *filter(None, [differs]))) or "nothing"
        yield code(arguments) or "no flag", code(found.policy.spec), notes


def _megatron_modules() -> Rows:
    for entry in _of("megatron"):
        module = entry.spec.removeprefix("megatron:")
        kind = "its output is discarded" if module in DISCARDS_OUTPUT else "a checkpoint around it"
        yield code(module), kind, ", ".join(map(code, MODULES[module])), entry.kept, *_cost(entry, "gpt", "dot")


def _megatron_offloads() -> Rows:
    for module, names in OFFLOAD_INPUTS.items():
        if names is None:
            yield code(module), "", "its input has no tag in our models; tag it in yours, then `none;offload:NAME`"
        else:
            flags = f"--fine-grained-activation-offloading --offload-modules {module}"
            yield code(module), code(from_megatron(flags).policy.spec), "nothing"


def _maxtext() -> Rows:
    rows = {}
    for entry in _of("maxtext"):
        names = " or ".join(code(spec.removeprefix("maxtext:")) for spec in (entry.spec, *entry.aliases))
        costs = _cost(entry, "llama", "blockwise")
        rows[entry.spec] = names, code(entry.spec), entry.kept, entry.recomputed, *costs
    yield code("none"), code(from_maxtext("none").policy.spec), *rows["maxtext:full"][2:]
    yield from rows.values()
    yield code("custom"), code("save:NAME;offload:NAME"), "what the knobs say", "the rest", "by name", "by name"


def _maxtext_tensors() -> Rows:
    for tensor, names in NAMES.items():
        found = [from_maxtext("custom", {tensor: place}).policy.spec for place in PLACES]
        yield code(tensor), ", ".join(map(code, names)), *map(code, found)


def _of(system: str) -> Iterator[Entry]:
    return (entry for entry in registry.table() if entry.spec.startswith(f"{system}:") and not entry.is_form)


def _cost(entry: Entry, family: Family, attention: Attention) -> tuple[str, str]:
    kept, host, recomputed = cost(entry, family, attention)
    return kept + (f", of it on the host {host}" if host not in ("0", "–") else ""), recomputed


TABLES: Mapping[tuple[str, ...], Callable[[], Rows]] = {
    ("policy there", "here", "what differs"): _pytorch,
    ("your flags there", "here", "what differs"): _megatron_flags,
    ("module", "there", "left out here", "stays", "bytes kept", "matmul FLOPs recomputed"): _megatron_modules,
    ("module", "here", "what differs"): _megatron_offloads,
    ("`remat_policy`", "here", "kept", "recomputed", "bytes kept", "matmul FLOPs recomputed"): _maxtext,
    ("tensor there", "here", *map("`{}`".format, PLACES)): _maxtext_tensors,
}
"""The headings of each table, and its rows."""


def code(text: str) -> str:
    """A cell of code; nothing stays nothing.

    >>> code("full"), code("")
    ('`full`', '')
    """
    return f"`{text}`" if text else ""


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table; bars inside a cell are escaped.

    >>> line(["a|b", "c"])
    '| a\\\\|b | c |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def refreshed(page: str) -> str:
    """The same page, its tables made anew."""
    for headings, rows in TABLES.items():
        head = f"{line(headings)}\n|{'---|' * len(headings)}\n"
        if head in page:
            made = head + "".join(f"{line(row)}\n" for row in rows())
            before, _, after = page.partition(head)
            page = before + made + re.sub(r"\A(\|.*\n)*", "", after)
    return page


def main(paths: Sequence[str]) -> int:
    """Make the tables of these pages anew."""
    if not paths:
        raise ValueError("page: expected a page such as docs/from-maxtext.md, got none")
    for path in map(Path, paths):
        write_whole(path, refreshed(path.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]), PROGRAM)
