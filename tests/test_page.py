"""A page opens offline, loads nothing, runs nothing, shows its pictures, and stays small."""

import base64
import html
import json
import re
import subprocess
import tempfile

import nbformat
import pandas as pd
import pytest
from matplotlib import image
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from browser import FLAGS, visit
from nvfp4lab.batch.piece import Result
from nvfp4lab.records import Evidence, Ledger, Stack, Target, Verdict
from nvfp4lab.report import index, page
from nvfp4lab.report.sanitise import sanitise
from nvfp4lab.report.style import figure
from nvfp4lab.report.tables import of_frame, table

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
        new_code_cell("text", outputs=[new_output("display_data", data={"text/html": text}) for text in HOSTILE]),
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


def test_nothing_of_a_data_frame_is_hidden():
    """On an H200 with 23 arms pandas left the two out that mattered, and 60 rows are soon reached."""
    wide = pd.DataFrame({f"arm {n}": [n / 3, 12345.6, None] for n in range(40)}, index=pd.Index(list("abc"), name="number"))
    shown = of_frame(wide)
    assert all(f"<th>arm {n}</th>" in shown for n in range(40)) and "<th>number</th>" in shown
    assert "<td>0.6667</td>" in shown and "<td>12,346</td>" in shown and "nan" not in shown.lower()
    tall = of_frame(pd.DataFrame({"count": pd.array([*range(100), None], dtype="Int64"), "said": ["<b>\n" + "x " * 200] * 101}))
    assert tall.count("<tr>") == 102 and "<td>99</td>" in tall and tall.count("x " * 199) == 101
    assert "&lt;b&gt;\\nx " in tall and "<b>" not in tall and "NA" not in tall


def test_tables_escape_their_cells_and_colour_verdicts():
    text = table(("a", "b"), [("<b>", Verdict.CRASH)])
    assert "&lt;b&gt;" in text
    assert 'class="lab-verdict crash"' in text


def test_an_index_names_the_whole_stack_whatever_record_comes_last(tmp_path):
    whole = Evidence("lab", "machine", Target("cpu"), Stack(sglang="0.5.23", torch="2.14.1", python="3.11"), Verdict.OK, "again")
    read = Evidence("source", "moe:x:q", Target("12.0"), Stack(sglang="0.5.9"), Verdict.NOT_RUN, "again", reason="read")
    Ledger(tmp_path / "ledger.jsonl").append(whole, read)
    index.write_run(tmp_path, [])
    assert "sglang 0.5.23, torch 2.14.1, python 3.11" in (tmp_path / "index.html").read_text()


def test_an_index_over_all_runs(tmp_path):
    for name in ("one-1", "two-2"):
        (tmp_path / name).mkdir()
        index.write_run(tmp_path / name, [])
    text = index.write_all(tmp_path).read_text()
    assert text.index("two-2") < text.index("one-1")
    assert 'href="one-1/index.html"' in text


# Words that stand on more than one line although they are words (no path, hash or command), cells beyond the page's own
# width that no frame around them can scroll to, and frames that do scroll.
MEASURE = """<script>
const broken = [];
for (const cell of document.querySelectorAll("main th, main td")) {
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    for (const word of node.data.matchAll(/[A-Za-z0-9_.]+/g)) {
      if (word[0].length > 28) continue;
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter(box => box.width).map(box => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
}
const frames = [...document.querySelectorAll("main *")].filter(one => getComputedStyle(one).overflowX === "auto");
const scrolling = frames.filter(one => one.scrollWidth > one.clientWidth + 1).length;
const page = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const answer = {broken, page, scrolling, inner: innerWidth};
const shown = parent.document.body.appendChild(parent.document.createElement("pre"));
shown.id = "measured";
shown.textContent = JSON.stringify(answer);
</script></body>"""


def measure(chromium, path, width, change=lambda text: text):
    """What a window of this width makes of the page: broken words, pixels beyond it, frames that scroll.

    The window is a frame of another page: headless Chromium makes none below 500 pixels.
    """
    text = change(path.read_text().replace('<details class="lab-source"', '<details open class="lab-source"'))
    copy = path.with_name(f"measured.{width}.html")
    inside = html.escape(text.replace("</body>", MEASURE))
    copy.write_text(f'<body><iframe style="border: 0; width: {width}px; height: 1200px" srcdoc="{inside}"></iframe></body>')
    with tempfile.TemporaryDirectory() as profile:
        asked = [chromium, *FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1500,1300", "--dump-dom", copy.as_uri()]
        dom = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(re.search(r'<pre id="measured">(.*?)</pre>', dom)[1])


SENTENCE = "the server ended before it was ready: ValueError: Current platform does not support this quantization"
ROW = ("fp4_gemm", "experimental_sgl_trtllm", SENTENCE * 3, "nvfp4lab routes --model-path /a" + "/b" * 60, Verdict.UNSUPPORTED)
WIDE = table(("op", "backend", "why not", "evidence", "verdict"), [ROW] * 3)
HEAD = "".join(f"<th>column_{n}, tok/s</th>" for n in range(20))
NUMBERS = "<th>moe-nvfp4-flashinfer_trtllm</th>" + "<td>1234.567</td>" * 19
PANDAS = f"<table><thead><tr>{HEAD}</tr></thead><tbody><tr>{NUMBERS}</tr></tbody></table>"


def page_with_tables(tmp_path):
    subjects = table(("subject",), [("moe:experimental_sgl_trtllm:modelopt_fp4:m16n2048k4096",)])
    tables = (WIDE, PANDAS, subjects)
    cells = [new_code_cell("t", outputs=[new_output("display_data", data={"text/html": text})]) for text in tables]
    log = new_code_cell("log", outputs=[new_output("stream", name="stdout", text=f"{SENTENCE} {SENTENCE}\n" * 3)])
    markdown = "|flag value|when|\n|-|-|\n|`experimental_sgl_trtllm`|" + SENTENCE + "|\n"
    return render(tmp_path, new_markdown_cell("# Title\n\n" + markdown), *cells, log)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_no_column_is_narrower_than_its_words_and_tables_scroll_in_their_own_frame(tmp_path, chromium, width):
    path = page_with_tables(tmp_path)
    seen = measure(chromium, path, width)
    assert seen["inner"] == width
    assert seen["broken"] == []
    assert seen["page"] <= 0, "the page itself scrolls sideways"
    assert seen["scrolling"] >= 1


@pytest.mark.browser
def test_the_measure_above_can_fail(tmp_path, chromium):
    path = page_with_tables(tmp_path)
    anywhere = measure(chromium, path, 390, lambda text: text.replace("overflow-wrap: normal", "overflow-wrap: anywhere"))
    assert "backend" in anywhere["broken"]
    unframed = measure(chromium, path, 390, lambda text: text.replace("overflow-x: auto", "overflow-x: visible"))
    assert unframed["page"] > 0


@pytest.mark.browser
def test_on_paper_nothing_stands_in_a_frame_and_words_are_whole(tmp_path, chromium):
    seen = measure(chromium, page_with_tables(tmp_path), 720, lambda text: text.replace("@media print", "@media screen"))
    assert seen["broken"] == []
    assert seen["scrolling"] == 0


@pytest.mark.browser
def test_an_index_keeps_names_and_states_whole_on_a_phone(tmp_path, chromium):
    results = [Result("32_server_throughput.h200_load", "hash", Verdict.NOT_RUN, SENTENCE, 12.5)]
    index.write_run(tmp_path, results)
    seen = measure(chromium, tmp_path / "index.html", 390)
    assert seen["broken"] == []
    assert seen["page"] <= 0


def test_a_badge_keeps_its_colour_on_paper():
    css = (page.HERE / "page.css").read_text()
    rule = re.search(r"\.lab-verdict \{(.*?)\}", css)[1]
    assert "print-color-adjust: exact" in rule


def test_what_a_cell_printed_at_length_before_its_picture_is_folded(tmp_path):
    long, short = "\n".join(f"arm {n}: ready" for n in range(30)), "three lines\nof a\nresult"
    cells = [
        new_code_cell("a", outputs=[new_output("stream", name="stdout", text=long), picture()]),
        new_code_cell("b", outputs=[new_output("stream", name="stdout", text=short), picture()]),
        new_code_cell("c", outputs=[new_output("stream", name="stdout", text="only\n" * 30)]),
    ]
    text = render(tmp_path, *cells).read_text()
    assert text.count("<summary>log</summary>") == 1
    assert text.index("<summary>log</summary>") < text.index("arm 29: ready") < text.index("three lines")
