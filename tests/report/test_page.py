"""The page: its data are the timeline's, nothing is fetched, and it is built for keyboard and screen reader."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import jax.numpy as jnp
import pytest

import policies
from jremat.check.finding import Finding
from jremat.command.step import gradient_step
from jremat.graph.peak import predicted_memory
from jremat.policy import tag
from jremat.report.explain import explain
from jremat.report.page import PolicyView, page
from jremat.report.timeline import timeline
from jremat.terminal.tables import human
from jremat.transform.checkpoint import checkpoint

TITLE = "mine </script><script>alert(1)</script> & more"
ARGS = jnp.ones((64, 32)), jnp.ones((32, 128)), jnp.ones((128, 32))


def mlp(x, w, v):
    return jnp.sin(tag(x @ w, "up")) @ v


def told(spec: str) -> PolicyView:
    policy = policies.get(spec)
    found = explain(mlp, *ARGS, policy=policy)
    step, args = gradient_step(checkpoint(mlp, policy), ARGS, {})
    return PolicyView(found, timeline(predicted_memory(step, *args), found, updates=False))


class Reader(HTMLParser):
    """Every element with its attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"{tag} isn't closed where it was opened"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, name: str, **attributes: str) -> list[dict[str, str | None]]:
        return [a for own, a in self.elements if own == name and attributes.items() <= a.items()]


@pytest.fixture(scope="module")
def pair() -> tuple[PolicyView, PolicyView]:
    return told("save:up"), told("full")


@pytest.fixture(scope="module")
def text(pair) -> str:
    finding = Finding("rule-of-mine", "something <b>odd</b>", "net.py:3 (f)", "do otherwise", 2048)
    return page(TITLE, *pair, [finding])


@pytest.fixture(scope="module")
def read(text) -> Reader:
    return Reader(text)


def test_the_data_in_the_page_are_the_timelines(read, pair):
    script = next(body for own, body in read.texts if own == "script" and body.startswith("{"))
    data = json.loads(script)
    assert data["timelines"] == json.loads(json.dumps([one.timeline.to_dict() for one in pair]))
    for one, found in zip(data["timelines"], pair, strict=True):
        sums = [sum(values) for values in zip(*(values for _, values in one["lines"]), strict=True)]
        assert sums == [point["alive_bytes"] for point in one["points"]]
        assert max(sums) == one["peak_bytes"] == found.timeline.peak_bytes
        assert {line for line, _ in one["lines"]} <= set(data["paint"])
        assert {buffer["kind"] for buffer in one["buffers"]} <= set(data["lines"])


def test_nothing_is_fetched(text, read):
    assert len(text.encode()) < 2_000_000
    for name, attributes in read.elements:
        assert name not in ("link", "iframe", "img", "object", "embed")
        assert not attributes.get("src") and (attributes.get("href") or "#").startswith("#")
    assert "@import" not in text and "url(http" not in text and "fetch(" not in text
    (policy,) = (a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_text_stays_text(text, read):
    assert "<script>alert" not in text and "<b>odd" not in text
    assert "".join(body for own, body in read.texts if own == "h1") == TITLE
    assert len(read.all("script")) == 2


def test_the_chart_is_a_slider_that_the_keyboard_reaches(read, pair):
    sliders = read.all("div", role="slider")
    assert len(sliders) == 2
    ids = {a["id"] for _, a in read.elements if a.get("id")}
    for slider, one in zip(sliders, pair, strict=True):
        assert slider["tabindex"] == "0" and slider["aria-label"]
        assert int(slider["aria-valuemin"]) == 0
        assert int(slider["aria-valuemax"]) == len(one.timeline.points) - 1
        assert int(slider["aria-valuenow"]) == one.timeline.peak_step
        assert slider["aria-describedby"] in ids
    labelled = [a["aria-labelledby"] for _, a in read.elements if a.get("aria-labelledby")]
    assert labelled and set(labelled) <= ids and len(read.all("html", lang="en")) == 1


def test_the_focus_is_seen_and_every_key_is_heard(text):
    assert ":focus-visible" in text and "outline: none" not in text
    for key in ("ArrowRight", "ArrowLeft", "PageUp", "PageDown", "Home", "End"):
        assert key in text


def test_a_table_says_what_the_chart_shows(read, pair):
    cells = [body for own, body in read.texts if own == "td"]
    for one in pair:
        for point in one.timeline.points:
            assert human(point.alive_bytes) in cells
    assert all(a.get("scope") for a in read.all("th"))


def test_values_changes_and_findings_are_told(read, pair):
    words = " ".join(body for _, body in read.texts)
    for said in ("named up", "What changes from save:up to full", "rule-of-mine", "something <b>odd</b>", "2.0 KiB"):
        assert said in words
    assert human(pair[0].timeline.peak_bytes) in words
    assert all(assumption in words for assumption in pair[0].timeline.assumptions)


def test_a_step_of_thousands_of_moments_stays_under_two_megabytes():
    def deep(x, ws):
        for k in range(40):
            x = x + jnp.sin(tag(x @ ws[k], "up"))
        return x

    args = jnp.ones((64, 32)), jnp.ones((40, 32, 32))
    found = explain(deep, *args)
    step, shapes = gradient_step(deep, args, {})
    whole = timeline(predicted_memory(step, *shapes), found, updates=False)
    several = replace(whole, points=whole.points * 30, lines=tuple((name, values * 30) for name, values in whole.lines))
    text = page(TITLE, PolicyView(found, several), PolicyView(found, several))
    assert len(several.points) > 3000 and len(text.encode()) < 2_000_000
    (data,) = (json.loads(b) for own, b in Reader(text).texts if own == "script" and b.startswith("{"))
    for one in data["timelines"]:
        assert len(one["points"]) <= 1500 and one["points"][one["peak_step"]]["alive_bytes"] == whole.peak_bytes
        assert max(sum(values) for values in zip(*(v for _, v in one["lines"]), strict=True)) == whole.peak_bytes
