"""The dictionaries for users of other systems: made from the zoo and the translations, and complete."""

import re
from pathlib import Path

import pytest

import policies
from policies import maxtext as maxtext_zoo
from policies import megatron as megatron_zoo
from policies import translate_megatron
from policies.costs import cost
from policies.dictionaries import maxtext, megatron, pytorch

DOCS = Path(__file__).parents[2] / "docs"
MADE = {"pytorch": pytorch, "megatron": megatron, "maxtext": maxtext}


def cells(page: str) -> list[list[str]]:
    """The cells of every row of every table."""
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("system", MADE)
def test_the_committed_page_is_the_generated_one(system):
    command = f"python -m policies.dictionaries.{system} > docs/from-{system}.md"
    assert (DOCS / f"from-{system}.md").read_text() == MADE[system].page(), command
    assert command in MADE[system].page()


@pytest.mark.parametrize("system", MADE)
def test_no_cell_is_without_words_unless_its_neighbour_says_why(system):
    for row in cells(MADE[system].page()):
        assert row[0] and row[-1], row


def test_every_megatron_flag_that_is_read_has_a_line():
    told = " ".join(line for line, _ in megatron.LINES).split()
    read = {*translate_megatron._READ, *translate_megatron._NOTED, *translate_megatron._FUSED}
    assert read <= {word.removeprefix("--") for word in told if word.startswith("--")}


def test_every_megatron_module_has_its_row():
    rows = [row[0] for row in cells(megatron.page())]
    for module in (*megatron_zoo.MODULES, *translate_megatron.OFFLOAD_INPUTS):
        assert f"`{module}`" in rows
    assert set(megatron_zoo.MODULES) > megatron.DISCARDS_OUTPUT


def test_every_megatron_line_means_what_the_translation_says():
    rows = {row[0].strip("`"): row for row in cells(megatron.page())}
    for line, _ in megatron.LINES[1:]:
        found = policies.translate("megatron", line)
        assert rows[line][1] == f"`{found.policy.spec}`"
        assert all(note in rows[line][2] for note in found.notes)
        assert policies.get(found.policy.spec) == found.policy


def test_every_maxtext_policy_and_tensor_has_its_row():
    rows = cells(maxtext.page())
    by_spec = {row[1]: row for row in rows if len(row) == 6}
    for entry in maxtext_zoo.ENTRIES:
        kept, _, again = cost(entry, "llama", "blockwise")
        row = by_spec[f"`{entry.spec}`"]
        assert row[4].startswith(kept) and row[5] == again
        assert all(f"`{alias.removeprefix('maxtext:')}`" in row[0] for alias in entry.aliases)
    tensors = {row[0].strip("`"): row for row in rows if len(row) == 5}
    assert maxtext_zoo.NAMES.keys() <= tensors.keys()
    for tensor in maxtext_zoo.NAMES:
        spec = tensors[tensor][3].strip("`")
        assert policies.get(spec) == policies.translate("maxtext", "custom", {tensor: "offload"}).policy


def test_maxtexts_none_is_not_ours():
    row = next(row for row in cells(maxtext.page()) if row[0] == "`none`")
    assert row[1] == "`full`"
