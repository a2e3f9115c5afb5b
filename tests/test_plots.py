"""Figures hold the numbers they were given, the page needs nothing but itself, and tokens stay text."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from lens_gemma4 import plots
from lens_gemma4.plots import Section, Table

HOSTILE = "</script><img src='http://example.org/x.png' onerror=alert(1)><b>&amp;"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._skipped = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._skipped += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._skipped -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._skipped:
            self.words.append(data)

    def outside(self):
        """What a browser would ask somebody else for."""
        places = ("src", "href", "action", "data", "srcset", "poster")
        links = [given[place] for _, given in self.tags for place in places if given.get(place)]
        return [link for link in links if not link.startswith("#")]

    def ids(self):
        return [given["id"] for _, given in self.tags if "id" in given]


@pytest.fixture(scope="module")
def text():
    figure = plots.heatmap(
        [[1.0, -2.0], [0.5, 0.0]], ["0", "1"], [HOSTILE, " a"], row_title="block", unit=HOSTILE
    )
    sections = [
        Section("First", HOSTILE, [Table({"token": [HOSTILE], "logit": [1.5]}), figure]),
        Section(
            HOSTILE,
            "words",
            [plots.bars([1, -1], [HOSTILE, "b"])],
            numbers=Table({"part": ["x"], "logit": [0.25]}),
        ),
    ]
    return plots.page(HOSTILE, sections, HOSTILE)


# -- figures ------------------------------------------------------------------------------------------


def test_a_heatmap_holds_its_values_first_row_on_top():
    figure = plots.heatmap(
        [[1.0, -2.0, 0.0], [0.5, 0.0, 3.0]],
        ["0", "1"],
        ["a", "b", "c"],
        row_title="block",
        column_title="pos",
    )
    (trace,) = figure.data
    assert [list(row) for row in trace.z] == [[1.0, -2.0, 0.0], [0.5, 0.0, 3.0]]
    assert trace.zmid == 0 and figure.layout.yaxis.autorange == "reversed"
    assert trace.customdata[1][2] == "block 1, pos c"
    assert figure.layout.xaxis.title.text == "pos" and figure.layout.yaxis.title.text == "block"
    assert plots.heatmap([[1.0]], ["a"], ["b"], centred=False).data[0].zmid is None


def test_words_in_the_cells_are_text_and_as_many_as_values():
    cells = [["a", HOSTILE], ["<b>", "d"]]
    trace = plots.heatmap([[1, 2], [3, 4]], ["r", "s"], ["x", "y"], cells=cells).data[0]
    assert trace.text[1][1] == "d" and trace.text[1][0] == "&lt;b&gt;"
    assert trace.customdata[1][0].endswith(": &lt;b&gt;") and "<img" not in trace.text[0][1]
    assert plots.heatmap([[1, 2]], ["r"], ["x", "y"]).data[0].text is None
    with pytest.raises(ValueError, match="cells is not"):
        plots.heatmap([[1, 2]], ["r"], ["x", "y"], cells=[["a"]])


def test_equal_labels_stay_separate_columns():
    figure = plots.heatmap([[1.0, 2.0]], ["0"], [" the", " the"])
    assert list(figure.layout.xaxis.tickvals) == [0, 1]
    assert list(figure.layout.xaxis.ticktext) == [" the", " the"]
    assert list(plots.bars([1, 2], [" the", " the"]).data[0].y) == [0, 1]


def test_bars_are_coloured_by_sign():
    (trace,) = plots.bars([1.0, -2.0], ["a", "b"]).data
    assert list(trace.x) == [1.0, -2.0]
    assert list(trace.marker.color) == [plots.BLUE, plots.RED]


def test_curves_hold_their_values_and_differ_in_more_than_colour():
    figure = plots.lines([0, 2], {"a": [1.0, -2.0], "b": [0.5, 0.0]}, x_title="block", unit="nats")
    first, second = figure.data
    assert list(first.x) == list(second.x) == [0.0, 2.0]
    assert list(first.y) == [1.0, -2.0] and list(second.y) == [0.5, 0.0]
    assert (first.name, second.name) == ("a", "b")
    assert first.line.dash != second.line.dash and first.line.color != second.line.color
    assert figure.layout.xaxis.title.text == "block" and figure.layout.yaxis.title.text == "nats"
    assert figure.layout.yaxis.type == "linear"
    assert plots.lines([0], {"a": [1.0]}, log=True).layout.yaxis.type == "log"


def test_points_hold_their_values_on_a_diagonal():
    figure = plots.scatter([1.0, -2.0], [0.5, 3.0], ["a", "b"], x_title="direct")
    line, points = figure.data
    assert list(points.x) == [1.0, -2.0] and list(points.y) == [0.5, 3.0]
    assert list(points.text) == ["a", "b"] and figure.layout.xaxis.title.text == "direct"
    assert list(line.x) == list(line.y) == [-2.0, 3.0]
    assert len(plots.scatter([1.0], [0.5], ["a"], diagonal=False).data) == 1


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (
            lambda: plots.heatmap([[1.0]], ["a"], ["b", "c"]),
            r"values are \[1 1\], labels name 1 rows and 2 columns",
        ),
        (lambda: plots.heatmap([[1.0], [1.0]], ["a"], ["b"]), r"\[2 1\]"),
        (lambda: plots.heatmap([[1.0, 2.0], [1.0]], ["a", "b"], ["c", "d"]), "labels name"),
        (lambda: plots.bars([1.0], ["a", "b"]), "1 values and 2 labels"),
        (lambda: plots.lines([0, 1], {"a": [1, 2], "b": [1]}), "'b' has 1 values for 2 places"),
        (lambda: plots.lines([0, 1], {"a": [1, 0]}, log=True), "'a' reaches 0.0, which has no log"),
        (lambda: plots.scatter([1, 2], [1], ["a", "b"]), "2 x, 1 y and 2 labels"),
        (lambda: Table({"a": [1], "b": [1, 2]}), "of one length"),
    ],
)
def test_labels_must_fit(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()


# -- tables -------------------------------------------------------------------------------------------


def test_a_table_in_a_terminal():
    table = Table({"token": ["' a'", "' Paris'"], "rank": [0, 12], "logit": [21.53, -1.0]})
    assert table.text().splitlines() == [
        "token     rank    logit",
        "' a'         0  21.5300",
        "' Paris'    12  -1.0000",
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1.23456, "1.2346"),
        (0.0, "0.0000"),
        (-9.5e-7, "-9.5e-07"),
        (0.0001, "0.0001"),
        (7, "7"),
        ("x", "x"),
        (float("nan"), "nan"),
    ],
)
def test_small_numbers_do_not_become_zero(value, written):
    assert plots.shown(value) == written


def test_a_table_without_rows_is_its_head():
    assert Table({"a": [], "b": []}).text() == "a  b"


# -- the page -----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(text):
    assert Page(text).outside() == []
    assert text.count(get_plotlyjs()) == 1
    policy = next(
        given["content"]
        for tag, given in Page(text).tags
        if given.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_the_search_for_requests_finds_one():
    figure = plots.bars([1], ["a"])
    assert Page(figure.to_html(include_plotlyjs="cdn")).outside()
    assert Page('<img src="//example.org/a.png"><a href="#s0">').outside() == [
        "//example.org/a.png"
    ]


def test_a_page_without_figures_leaves_the_script_out():
    assert get_plotlyjs() not in plots.page("t", [Section("h", "t", [Table({"a": [1]})])])


def test_labels_are_text(text):
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"img", "b"}
    assert HOSTILE in "".join(page.words)  # shown as it was written
    assert HOSTILE not in text
    assert {"img", "b"} <= {tag for tag, _ in Page(f"<p>{HOSTILE}</p>").tags}  # the control


def test_labels_of_a_figure_are_text():
    """plotly reads tags in labels of its own accord."""
    figure = plots.heatmap([[1.0]], ["<b>x</b>"], ["&"])
    assert figure.layout.yaxis.ticktext[0] == "&lt;b&gt;x&lt;/b&gt;"
    assert figure.layout.xaxis.ticktext[0] == "&amp;"
    assert plots.lines([0], {"<b>": [1.0]}).data[0].name == "&lt;b&gt;"
    assert plots.scatter([0], [0], ["<b>"], diagonal=False).data[0].text[0] == "&lt;b&gt;"


def test_the_page_is_readable_and_works_from_the_keyboard(text):
    page = Page(text)
    assert ("html", {"lang": "en"}) in page.tags
    assert "viewport" in [given.get("name") for _, given in page.tags]
    links = [given["href"] for tag, given in page.tags if tag == "a"]
    assert links == ["#s0", "#s1"] and {"s0", "s1"} <= set(page.ids())
    assert len(page.ids()) == len(set(page.ids()))
    figures = [given for tag, given in page.tags if tag == "figure"]
    assert len(figures) == 2 and all(
        given["tabindex"] == "0" and given["aria-label"] for given in figures
    )
    assert sum(tag == "details" for tag, _ in page.tags) == 1
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2")] == ["h1", "h2", "h2"]
    assert all(given.get("scope") == "col" for tag, given in page.tags if tag == "th")


def test_the_same_input_gives_the_same_page():
    sections = [Section("h", "t", [plots.bars([1, 2], ["a", "b"])])]
    assert plots.page("t", sections) == plots.page("t", sections)


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    for draw in (plots.require, lambda: plots.bars([1], ["a"]), lambda: plots.page("t", [])):
        with pytest.raises(ImportError, match=r"pip install 'lens-gemma4\[plots\]'"):
            draw()
    assert Table({"a": [1]}).text() == "a\n1"  # tables do without


def test_importing_this_module_does_not_import_plotly():
    code = "import sys, lens_gemma4.plots; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
