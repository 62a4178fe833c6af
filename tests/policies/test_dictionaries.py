"""The dictionaries for users of other systems: made from the zoo and the translations, and complete."""

import re
from pathlib import Path

import pytest

import policies
from policies import dictionaries, megatron, translate_maxtext, translate_megatron
from policies.costs import cost

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {system: DOCS / f"from-{system}.md" for system in ("pytorch", "megatron", "maxtext")}


def cells(system: str) -> list[list[str]]:
    """The cells of every row of every table of a page."""
    rows = [line for line in PAGES[system].read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("system", PAGES)
def test_the_tables_of_a_page_are_those_that_the_zoo_gives(system):
    page = PAGES[system].read_text()
    made = dictionaries.refreshed(page)
    assert made == page, f"python -m policies.dictionaries docs/from-{system}.md"
    stale = re.sub(r"(?<=\|\n)\| .*\n", "", page)  # every row but the headings
    assert stale != page and dictionaries.refreshed(stale).count("\n") > stale.count("\n")


def test_every_table_stands_in_a_page():
    pages = "".join(path.read_text() for path in PAGES.values())
    assert all(dictionaries.line(headings) in pages for headings in dictionaries.TABLES)


@pytest.mark.parametrize("system", PAGES)
def test_no_cell_is_without_words_unless_its_neighbour_says_why(system):
    for row in cells(system):
        assert row[0] and row[-1], row


def test_every_megatron_flag_that_is_read_has_a_line():
    given = " ".join(line for line, _ in dictionaries.MEGATRON_LINES).split()
    read = {*translate_megatron._READ, *translate_megatron._NOTED, *translate_megatron._FUSED}
    assert read <= {word.removeprefix("--") for word in given if word.startswith("--")}


def test_every_megatron_module_has_its_row():
    rows = [row[0] for row in cells("megatron")]
    for module in (*megatron.MODULES, *translate_megatron.OFFLOAD_INPUTS):
        assert f"`{module}`" in rows
    assert set(megatron.MODULES) > dictionaries.DISCARDS_OUTPUT


def test_every_megatron_line_means_what_the_translation_says():
    rows = {row[0].strip("`"): row for row in cells("megatron")}
    for line, _ in dictionaries.MEGATRON_LINES[1:]:
        found = policies.translate("megatron", line)
        assert rows[line][1] == f"`{found.policy.spec}`"
        assert all(note in rows[line][2] for note in found.notes)
        assert policies.get(found.policy.spec) == found.policy


def test_every_maxtext_policy_and_tensor_has_its_row():
    rows = cells("maxtext")
    by_spec = {row[1]: row for row in rows if len(row) == 6}
    for entry in policies.table():
        if not entry.spec.startswith("maxtext:"):
            continue
        kept, _, recomputed = cost(entry, "llama", "blockwise")
        row = by_spec[f"`{entry.spec}`"]
        assert row[4].startswith(kept) and row[5] == recomputed
        assert all(f"`{alias.removeprefix('maxtext:')}`" in row[0] for alias in entry.aliases)
    tensors = {row[0].strip("`"): row for row in rows if len(row) == 5}
    names = translate_maxtext.NAMES
    assert names.keys() <= tensors.keys()
    for tensor in names:
        spec = tensors[tensor][3].strip("`")
        assert policies.get(spec) == policies.translate("maxtext", "custom", {tensor: "offload"}).policy


def test_maxtexts_none_is_not_ours():
    row = next(row for row in cells("maxtext") if row[0] == "`none`")
    assert row[1] == "`full`"
