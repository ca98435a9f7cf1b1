"""HTML tables for notebooks: whole sentences in cells, escaped, with verdict words coloured."""

import html
from collections.abc import Iterable, Sequence

from nvfp4lab.records import Verdict


class Html(str):
    """HTML text that a notebook shows as HTML when it is the last expression of a cell."""

    def _repr_html_(self) -> str:
        return str(self)


VERDICT_WORDS = frozenset(str(verdict) for verdict in Verdict)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table of `rows`; a cell that is exactly a verdict word becomes a badge, everything else is escaped text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return Html(f'<table class="lab-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def badge(verdict: object) -> str:
    """A coloured verdict word as HTML."""
    return f'<span class="lab-verdict {html.escape(str(verdict))}">{html.escape(str(verdict))}</span>'


def _cell(cell: object) -> str:
    text = "" if cell is None else str(cell)
    return badge(text) if text in VERDICT_WORDS else html.escape(text)
