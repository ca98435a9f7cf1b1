"""A page opens offline, loads nothing, runs nothing, shows its pictures, and stays small."""

import base64

import nbformat
import pytest
from matplotlib import image
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from browser import visit
from nvfp4lab.records import Evidence, Stack, Target, Verdict
from nvfp4lab.report import index, page
from nvfp4lab.report.sanitise import sanitise
from nvfp4lab.report.style import figure
from nvfp4lab.report.tables import table

RECORD = Evidence(
    "kernel", "moe:<b>x</b>", Target("12.0"), Stack(), Verdict.UNSUPPORTED, "again <script>", reason="it said: <img src=x>"
)


def picture():
    """Outputs of a cell that shows a figure, as the kernel would send them."""
    made = figure(alt="a rising line")
    made.subplots().plot([1, 2])
    data, metadata = made._repr_mimebundle_()
    data = data | {"image/png": base64.b64encode(data["image/png"]).decode()}
    return new_output("display_data", data=data, metadata=metadata)


def render(tmp_path, *cells):
    """The path of the page of a notebook with these cells."""
    source = tmp_path / "executed.ipynb"
    nbformat.write(
        new_notebook(cells=list(cells), metadata={"nvfp4lab_run": {"verdict": "ok", "reason": "", "cell": None}}), source
    )
    page.render(source, tmp_path / "page.html", [RECORD])
    return tmp_path / "page.html"


HOSTILE = [
    '<script>fetch("http://evil.example/a")</script>',
    '<img src="http://evil.example/b.png">',
    '<img src=x onerror="fetch(1)">',
    '<iframe src="http://evil.example/c"></iframe>',
    '<a href="javascript:alert(1)">x</a>',
    '<svg onload="alert(1)"></svg>',
    '<div style="background:url(http://evil.example/d)">x</div>',
    '<link rel="stylesheet" href="http://evil.example/e.css">',
    '<style>@import "http://evil.example/f.css";</style>',
    '<object data="http://evil.example/g"></object>',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_html_is_disarmed(text):
    clean = sanitise(text)
    for live in ("<script", '<img src="http', 'onerror="', "<iframe", "javascript:", "<svg", "url(", "<link", "@import", "<object"):
        assert live not in clean, clean


@pytest.mark.browser
def test_a_page_opens_offline_and_shows_its_pictures(tmp_path, chromium):
    cells = [
        new_markdown_cell("# A question\n\n**An answer** with a | table\n\n|a|b|\n|-|-|\n|1|2|\n\n" + HOSTILE[0]),
        new_code_cell("draw()", outputs=[picture()]),
        new_code_cell("text", outputs=[new_output("display_data", data={"text/html": html}) for html in HOSTILE]),
        new_code_cell("log", outputs=[new_output("stream", name="stdout", text="\n".join(HOSTILE))]),
        new_code_cell(
            "run", outputs=[new_output("display_data", data={"application/javascript": "fetch('http://evil.example/h')"})]
        ),
    ]
    path = render(tmp_path, *cells)
    seen = visit(chromium, path)
    assert seen.requests == ()
    assert seen.console == ()
    assert "<h1" in seen.dom
    assert 'alt="a rising line"' in seen.dom
    assert "<strong>An answer</strong>" in seen.dom
    assert path.stat().st_size <= page.MAX_PAGE_BYTES
    assert seen.screenshot.stat().st_size > 20_000


@pytest.mark.browser
def test_a_page_follows_the_readers_colours_and_fits_a_phone(tmp_path, chromium):
    path = render(tmp_path, new_markdown_cell("# Title\n\n" + "a_long_word_" * 20))
    light, dark, phone = visit(chromium, path), visit(chromium, path, dark=True), visit(chromium, path, width=400)
    pixels = {name: image.imread(seen.screenshot)[5:60, 5:60, :3].mean() for name, seen in (("light", light), ("dark", dark))}
    assert pixels["light"] > 0.9
    assert pixels["dark"] < 0.3
    assert image.imread(phone.screenshot).shape[1] == 400


@pytest.mark.browser
def test_the_browser_would_have_told_us(tmp_path, chromium):
    """The two assertions above can fail: a page that loads and logs is seen to."""
    loud = tmp_path / "loud.html"
    loud.write_text('<script>console.log("hello")</script><img src="http://127.0.0.1:9/x.png">')
    seen = visit(chromium, loud)
    assert seen.requests == ("http://127.0.0.1:9/x.png",)
    assert seen.console


def test_the_verdict_stands_first_and_every_record_can_be_repeated(tmp_path):
    text = render(tmp_path, new_markdown_cell("# Title\n")).read_text()
    body = text[text.index("<main>") :]
    assert body.index('lab-verdict ok">ok') < body.index("Title")
    assert "again &lt;script&gt;" in text
    assert "moe:&lt;b&gt;x&lt;/b&gt;" in text


def test_tables_escape_their_cells_and_colour_verdicts():
    text = table(("a", "b"), [("<b>", Verdict.CRASH)])
    assert "&lt;b&gt;" in text
    assert 'class="lab-verdict crash"' in text


def test_an_index_over_all_runs(tmp_path):
    for name in ("one-1", "two-2"):
        (tmp_path / name).mkdir()
        index.write_run(tmp_path / name, [])
    text = index.write_all(tmp_path).read_text()
    assert text.index("two-2") < text.index("one-1")
    assert 'href="one-1/index.html"' in text
