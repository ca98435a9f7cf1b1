"""HTML tables for notebooks: whole sentences in cells, escaped, with verdict words coloured."""

import html
from collections.abc import Iterable, Sequence

from IPython.display import HTML

from nvfp4lab.records import Verdict

VERDICT_WORDS = frozenset(str(verdict) for verdict in Verdict)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> HTML:
    """A table of `rows`; a cell that is exactly a verdict word becomes a badge, everything else is escaped text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return HTML(f'<table class="lab-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def badge(verdict: object) -> str:
    """A coloured verdict word as HTML."""
    return f'<span class="lab-verdict {html.escape(str(verdict))}">{html.escape(str(verdict))}</span>'


def _cell(cell: object) -> str:
    text = "" if cell is None else str(cell)
    return badge(text) if text in VERDICT_WORDS else html.escape(text)
