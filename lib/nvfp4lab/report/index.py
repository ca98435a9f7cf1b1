"""`index.html` of a run, and of all runs: which notebooks ran, how each ended, where its page is."""

import collections
import html
from collections.abc import Sequence
from pathlib import Path

from nvfp4lab.batch.piece import Result
from nvfp4lab.records import Ledger
from nvfp4lab.report.redact import redact
from nvfp4lab.report.tables import badge

PAGE_CSS = Path(__file__).with_name("page.css")


def write_run(run_dir: Path, results: Sequence[Result]) -> None:
    """(Re)write the index of one run folder from its results and its joined ledger."""
    records = list(Ledger(run_dir / "ledger.jsonl"))
    counts = collections.Counter(str(record.verdict) for record in records)
    rows = "".join(_row(run_dir, result) for result in results)
    verdicts = " ".join(f"{badge(verdict)}&nbsp;{count}" for verdict, count in counts.most_common()) or "none yet"
    stack = records[-1].stack if records else None
    known = " ".join(f"{name} {value}" for name, value in (vars(stack) if stack else {}).items() if value)
    body = (
        f'<section class="lab-summary"><h1>{html.escape(run_dir.name)}</h1><p>Evidence: {verdicts}</p>'
        f"<p>Stack: {html.escape(known or 'not recorded yet')}</p></section>"
        '<div class="lab-scroll"><table class="lab-table"><tr><th>notebook</th><th>state</th><th>seconds</th><th>what happened</th></tr>'
        f'{rows}</table></div><p><a href="ledger.jsonl">ledger.jsonl</a> holds every record.</p>'
    )
    _write(run_dir / "index.html", run_dir.name, body)


def write_all(outputs: Path) -> Path:
    """(Re)write the index over all runs under `outputs`, newest first; returns its path."""
    runs = sorted(
        (page.parent for page in outputs.glob("**/index.html") if page.parent != outputs), key=lambda run: run.name, reverse=True
    )
    rows = "".join(_run_row(outputs, run) for run in runs)
    body = f'<section class="lab-summary"><h1>All runs</h1></section><table class="lab-table"><tr><th>run</th><th>evidence</th></tr>{rows}</table>'
    _write(outputs / "index.html", "All runs", body)
    return outputs / "index.html"


def _run_row(outputs: Path, run: Path) -> str:
    counts = collections.Counter(str(record.verdict) for record in Ledger(run / "ledger.jsonl"))
    link = html.escape(str(run.relative_to(outputs)))
    verdicts = " ".join(f"{badge(verdict)}&nbsp;{count}" for verdict, count in counts.most_common())
    return f'<tr><td><a href="{link}/index.html">{link}</a></td><td>{verdicts}</td></tr>'


def _row(run_dir: Path, result: Result) -> str:
    page = run_dir / f"{result.name}.html"
    name = html.escape(result.name)
    link = f'<a href="{name}.html">{name}</a>' if page.exists() else name
    return f"<tr><td>{link}</td><td>{badge(result.verdict)}</td><td>{result.seconds:.1f}</td><td>{html.escape(result.reason)}</td></tr>"


def _write(path: Path, title: str, body: str) -> None:
    css = PAGE_CSS.read_text(encoding="utf-8")
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><style>{css}</style></head><body class="lab-index"><main>{body}</main></body></html>'
    )
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(redact(page), encoding="utf-8")
    beside.replace(path)
