"""`index.html` of a run, and of all runs: which notebooks ran, how each ended, where its page is."""

import collections
import functools
from collections.abc import Sequence
from pathlib import Path

import jinja2

from nvfp4lab import atomic
from nvfp4lab.batch.piece import Result
from nvfp4lab.errors import LabError
from nvfp4lab.records import Evidence, Ledger
from nvfp4lab.report.redact import redact

HERE = Path(__file__).parent


def write_run(run_dir: Path, results: Sequence[Result]) -> None:
    """(Re)write the index of one run folder from its results and its joined ledger."""
    records = list(Ledger(run_dir / "ledger.jsonl"))
    stack = max((_known(record) for record in records), key=len, default=[])  # of a reading only the packages read are known
    rows = [(result, (run_dir / f"{result.name}.html").exists()) for result in results]
    _write(run_dir / "index.html", "run.html.j2", title=run_dir.name, counts=_counts(records), stack=stack, rows=rows)


def write_all(outputs: Path) -> Path:
    """(Re)write the index over all runs under `outputs`, newest first; returns its path. Raises LabError without any."""
    runs = [page.parent for page in outputs.glob("**/index.html") if page.parent != outputs]
    if not runs:
        raise LabError(f"{outputs}: no run in this folder or below it (a run has an index.html of its own)")
    runs.sort(key=lambda run: run.name, reverse=True)
    rows = [(run.relative_to(outputs).as_posix(), _counts(Ledger(run / "ledger.jsonl"))) for run in runs]
    _write(outputs / "index.html", "all.html.j2", title="All runs", rows=rows)
    return outputs / "index.html"


def _known(record: Evidence) -> list[tuple[str, str]]:
    return [(name, value) for name, value in vars(record.stack).items() if value]


def _counts(records: Sequence[Evidence] | Ledger) -> list[tuple[str, int]]:
    return collections.Counter(str(record.verdict) for record in records).most_common()


@functools.lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    return jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined)


def _write(path: Path, template: str, **values) -> None:
    css = (HERE / "page.css").read_text(encoding="utf-8")
    page = _templates().get_template(template).render(css=css, **values)
    atomic.replace(path, redact(page))
