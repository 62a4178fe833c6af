"""Tables at every width: each cell whole, no line too wide; and text that stays text."""

import io
import itertools

import jax
import jax.numpy as jnp
import pytest
from rich.cells import cell_len
from rich.console import Console

import jremat
from jremat.terminal.tables import Table, columns, console, show
from jremat.terminal.text import printable, wrapped

ODD = [
    "mlp[up]",
    "[/b]",
    "[red]x[/]",
    ":smile:",
    "$x_1$",
    "_hidden",
    "<b>",
    "幅" * 9,
    "\x1b[31mred",
    "a\nb",
    "\ud800",
    "n" * 90,
]
WIDTHS = [20, 40, 60, 80, 100, 200]


def printed(table: Table, width: int) -> str:
    file = io.StringIO()
    screen = console(file)
    screen.width = width
    screen.print(table)
    return file.getvalue()


def of_words(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(("width", "loose"), list(itertools.product(WIDTHS, [(), ("why",), ("shape", "why")])))
def test_every_cell_is_whole_at_every_width(width, loose):
    heads = ("value", "shape", "bytes", "share", "why")
    table = columns("a title that is longer than the narrowest screen", heads, right=("bytes", "share"), loose=loose)
    rows = [(name, "bf16[8,128]", f"{k}.0 MiB", "1.0%", f"kept since rule {k} names it") for k, name in enumerate(ODD)]
    for row in rows:
        table.add_row(*row)
        table.add_note(f"a note on {row[2]}")
    out = printed(table, width)
    assert max(map(cell_len, out.splitlines())) <= width
    assert "…" not in out and "\x1b" not in out
    for row in rows:
        for cell in row:
            assert of_words(printable(cell)) in of_words(out), cell
        if len(row[0]) < width // 2:  # a name that fits a line is on one
            assert any(printable(row[0]) in line for line in out.splitlines())


def test_what_fits_is_on_one_line_and_what_does_not_goes_below_its_row():
    table = columns("", ("value", "bytes", "why"), right=("bytes",), loose=("why",))
    table.add_row("  up", "2.0 MiB", "the policy keeps what is named up")
    assert printed(table, 80).splitlines()[-1] == "  up   2.0 MiB  the policy keeps what is named up"
    assert printed(table, 40).splitlines()[-2:] == ["  up   2.0 MiB", "      the policy keeps what is named up"]


def test_a_long_label_has_a_line_to_itself_and_the_figures_stay_in_their_columns():
    table = columns("", ("plan", "peak", "fits"), right=("peak", "fits"))
    table.add_row("full", "1.0 GiB", "yes")
    table.add_row("save:" + ",".join(f"name{k}" for k in range(12)), "2.0 GiB", "no")
    lines = printed(table, 60).splitlines()
    assert lines[2].split() == ["full", "1.0", "GiB", "yes"] and lines[-1].split() == ["2.0", "GiB", "no"]
    assert lines[2].index("1.0 GiB") == lines[-1].index("2.0 GiB")


@pytest.mark.parametrize(("variable", "width"), [("70", 70), ("7", 20), ("", 160), ("many", 160)])
def test_a_pipe_is_as_wide_as_columns_says(variable, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", variable)
    assert console().width == width


def test_text_on_a_screen_breaks_between_words_and_keeps_its_marks(capsys):
    screen = Console(width=30, file=(file := io.StringIO()), markup=False)
    show(screen, "kept         [b]10 MiB[/b] in 8 values", indent=13)
    assert file.getvalue().splitlines() == ["kept         [b]10 MiB[/b] in", "             8 values"]


@pytest.mark.parametrize("text", ODD)
def test_printable_text_is_printable_and_nothing_is_lost_in_wrapping(text):
    assert printable(text).isprintable() and printable(printable(text)) == printable(text)
    for width in (5, 20):
        lines = wrapped(printable(text), width)
        assert "".join(lines) == printable(text) and max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [40, 80, 250])
def test_results_print_as_wide_as_the_terminal_and_lose_nothing(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(x, w):
        with jax.named_scope("a_long_name_of_a_scope_that_stands_in_no_narrow_terminal"):
            return jnp.sin(jremat.tag(x @ w, "a_tag_with_a_name_as_long_as_names_are_at_times"))

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    results = (
        jremat.explain(block, shape, shape),
        jremat.residuals(block, shape, shape),
        jremat.predicted_memory(jax.grad(lambda x, w: block(x, w).sum()), shape, shape),
    )
    monkeypatch.setenv("COLUMNS", "1000")
    whole = [str(result).split() for result in results]
    monkeypatch.setenv("COLUMNS", str(width))
    for result, words in zip(results, whole):
        printed = str(result)
        assert max(map(len, printed.splitlines())) <= width
        assert "".join(printed.split()) == "".join(words)
