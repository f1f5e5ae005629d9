"""The blocks of a page: what is in the HTML, and that no text can break out of it."""

from __future__ import annotations

import json
import re

import altair as alt
import pytest

from safa.report import figures
from safa.report.figures import Axis
from safa.report.page import (
    BEST,
    OUTSIDE,
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Folded,
    Headline,
    Markup,
    Section,
    Table,
    Words,
    blocks_of,
    render,
)  # fmt: skip

EVIL = "</script><script>alert(1)</script><b title=\"x\">&amp; 'quoted'"


def page(*blocks: Block) -> str:
    return render("A title", "A lead.", [Section("One", list(blocks))])


def chart() -> alt.LayerChart:
    rows = [{"round": number, "loss": 1 / number, "name": EVIL} for number in (1, 2, 3)]
    return figures.lines(rows, Axis("round", "round"), Axis("loss", EVIL), series="name")


def test_every_text_is_escaped() -> None:
    html = render(EVIL, EVIL, [Section(EVIL, [
        Words(EVIL),
        Facts([Fact(EVIL, EVIL, EVIL, EVIL)]),
        Folded(EVIL, [Words(EVIL)]),
        Figure(chart(), EVIL, EVIL, EVIL),
        Table([Column(EVIL, EVIL)], [[Cell(EVIL, EVIL, OUTSIDE)]], caption=EVIL, row_marks={0: BEST}),
    ])])  # fmt: skip
    assert "<script>alert" not in html
    assert "<b title" not in html
    assert html.count("</script>") == html.count("<script") == 4  # a chart, the themes, the library, the script


def test_markup_alone_is_taken_as_it_is() -> None:
    assert "<em>so</em>" in page(Markup("<em>so</em>"))


def test_words_have_paragraphs_and_code() -> None:
    assert "<p>one</p><p>two <code>a &lt; b</code></p>" in page(Words("one\n\ntwo `a < b`"))


def test_a_page_without_charts_needs_no_library() -> None:
    assert len(page(Words("only words"))) < 40_000


def test_the_library_is_there_once_and_nothing_comes_from_outside() -> None:
    html = page(Figure(chart(), "a", "b", "c"), Figure(chart(), "d", "e", "f"))
    assert html.count("window.vegaEmbed=") == 1
    markup = re.sub(r"(<script[^>]*>).*?</script>", r"\1", html, flags=re.DOTALL)
    assert not re.search(r"src=|url\(|@import|http:|https:", markup)
    assert "connect-src" not in html
    assert "default-src 'none'" in html


def test_no_other_script_may_run() -> None:
    page = render("A page", "", [Section("One", [Words("text")])])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert re.search(r"default-src 'none'; script-src ('sha256-[\w+/]+=' )+'unsafe-eval';", policy)


def test_a_chart_is_sent_as_json() -> None:
    html = page(Figure(chart(), "a", "b", "c"))
    spec = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[0])
    assert spec["width"] == "container"
    assert "config" not in spec


def test_small_figures_stand_side_by_side() -> None:
    small = Figure(chart(), "a", "b", "c", wide=False)
    assert page(small, small, Words("x"), small).count('<div class="side">') == 2


def test_anchors_are_different_and_contents_come_with_many_sections() -> None:
    sections = [Section("Same name", []), Section("Same name", []), Section("Third", [], id="own"), Section("…", [])]
    html = render("t", "l", sections)
    assert re.findall(r'<section id="([^"]+)"', html) == ["same-name", "same-name-2", "own", "section"]
    assert 'href="#same-name-2"' in html
    assert "<nav" not in render("t", "l", sections[:2])


def test_cells_carry_what_they_are_sorted_by() -> None:
    rows = [[Cell("1.5 s", 1.5)], [Cell("")], [Cell("unlimited", float("inf"))], [Cell("bad", float("nan"))]]
    html = page(Table(["time"], rows))
    assert re.findall(r'data-value="([^"]*)"', html) == ["1.5", "", "Infinity", ""]
    assert "\N{EN DASH}</td>" in html


def test_numbers_stand_on_the_right() -> None:
    html = page(Table(["n", "s"], [[Cell("1", 1), "a"], [Cell(""), "b"]]))
    assert html.count('<th scope="col" aria-sort="none" class="number">') == 1


def test_marks_have_a_symbol_a_word_and_a_key() -> None:
    html = page(Table(["n"], [[Cell("1", 1, OUTSIDE)], ["2"]], row_marks={1: BEST}))
    assert '<span aria-hidden="true">▲</span><span class="unseen">outside tolerance</span>' in html
    assert '<tr class="marked good">' in html
    assert html.count("<li><span") == 2


def test_a_row_must_fit_its_columns() -> None:
    with pytest.raises(ValueError, match="1 cells, but there are 2 columns"):
        Table(["a", "b"], [["x"]])


def test_a_table_can_do_without_a_filter() -> None:
    assert '<input type="search"' not in page(Table(["a"], [["x"]], filterable=False))


def sections(words: str) -> list[Section]:
    return [Section("One", [Words(words), Folded("More", [Words("inside"), Folded("Yet more", [Words("deep")])])])]


def test_blocks_have_keys_that_stay_the_same() -> None:
    html = render("t", "l", sections("now"))
    assert re.findall(r'<(\w+) data-block="([^"]+)"', html) == [
        ("div", "one-0"), ("details", "one-1"), ("div", "one-1-0"), ("details", "one-1-1"), ("div", "one-1-1-0"),
    ]  # fmt: skip
    now, then = blocks_of(sections("now")), blocks_of(sections("then"))
    assert list(now) == list(then) == ["one-0", "one-1-0", "one-1-1-0"]
    assert {key for key in now if now[key] != then[key]} == {"one-0"}
    assert all(block in html for block in now.values())


def test_a_headline_has_the_name_for_people_and_that_of_the_column() -> None:
    html = page(Headline([Fact("Accuracy", "0.93", "of the last model", "last_accuracy")]))
    card = '<dt>Accuracy <code>last_accuracy</code></dt><dd>0.93</dd><dd class="meaning">of the last model</dd>'
    assert f'<dl data-block="one-0" class="headline"><div>{card}</div></dl>' in html
