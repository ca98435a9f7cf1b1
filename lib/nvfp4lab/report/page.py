"""One executed notebook -> one HTML page that opens offline: verdict first, pictures, then how to repeat each row.

The page loads nothing: no script or font from elsewhere, pictures embedded. Outputs are sanitised, the code is folded.
"""

import collections
import html
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor

from nvfp4lab import atomic
from nvfp4lab.records import Evidence
from nvfp4lab.report.redact import redact
from nvfp4lab.report.sanitise import sanitise
from nvfp4lab.report.tables import badge, table_cell

HERE = Path(__file__).parent
MAX_PAGE_BYTES = 3_000_000
SHORT_LOG_LINES = 8


class Tidy(Preprocessor):
    """Gives every picture without a description the heading it stands under, shows a progress bar's end only, and folds
    what a cell printed at length on the way to its picture or table."""

    def preprocess(self, nb, resources):
        """Walk cells in order, remembering the last heading."""
        heading = "figure"
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                headings = [line.lstrip("#").strip() for line in cell.source.splitlines() if line.startswith("#")]
                heading = headings[-1] if headings else heading
            outputs = cell.get("outputs", [])
            shows = any(output.output_type in ("display_data", "execute_result") for output in outputs)
            for output in outputs:
                if output.output_type == "stream":
                    output.text = _overwritten(output.text)
                    if shows and len(output.text.splitlines()) > SHORT_LOG_LINES:
                        output.name = "stderr"  # which the template folds
                for mime in set(output.get("data", {})) & {"image/png", "image/jpeg"}:
                    output.setdefault("metadata", {}).setdefault(mime, {}).setdefault("alt", heading)
        return nb, resources


def render(notebook: Path, page: Path, records: Sequence[Evidence]) -> None:
    """Write the page of an executed notebook. `records`: the evidence it wrote, shown on top and with its repro lines."""
    exporter = HTMLExporter(
        template_name="lab_page", extra_template_basedirs=[str(HERE / "templates")], sanitize_html=True, embed_images=True
    )
    exporter.register_preprocessor(Tidy, enabled=True)
    exporter.register_filter("clean_html", sanitise)
    node = nbformat.read(notebook, as_version=4)
    body, _ = exporter.from_notebook_node(
        node,
        resources={
            "metadata": {"name": notebook.stem},
            "page_css": (HERE / "page.css").read_text(encoding="utf-8"),
            "dark_css": _dark_theme(exporter),
            "summary_html": summary(node, records) + repeat_table(records),
        },
    )
    atomic.replace(page, redact(body))


def summary(node, records: Sequence[Evidence]) -> str:
    """HTML that stands on top: did the notebook itself run, and what did it find?"""
    run = node.metadata.get("nvfp4lab_run", {})
    lines = [f"<p>This notebook: {badge(run.get('verdict', 'not_run'))} {html.escape(run.get('reason', ''))}</p>"]
    counts = collections.Counter(str(record.verdict) for record in records)
    if counts:
        lines.append(
            "<p>Evidence: " + " ".join(f"{badge(verdict)}&nbsp;{count}" for verdict, count in counts.most_common()) + "</p>"
        )
    return f'<section class="lab-summary">{"".join(lines)}</section>'


def repeat_table(records: Sequence[Evidence]) -> str:
    """Folded HTML table: one row a record, with its verdict, reason and repro line."""
    if not records:
        return ""
    cells = ((table_cell(r.verdict), table_cell(r.subject), table_cell(r.reason), table_cell(r.repro, code=True)) for r in records)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    head = "<tr><th>verdict</th><th>subject</th><th>reason</th><th>repeat it with</th></tr>"
    return (
        f'<details class="lab-source"><summary>evidence and repro lines ({len(records)})</summary>'
        f'<div class="lab-scroll"><table class="lab-table">{head}{rows}</table></div></details>'
    )


def _overwritten(text: str) -> str:
    """`text` as a terminal would show it in the end: a carriage return begins the line anew."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def _dark_theme(exporter: HTMLExporter) -> str:
    environment = exporter.environment
    return environment.loader.get_source(environment, "lab/static/theme-dark.css")[0]
