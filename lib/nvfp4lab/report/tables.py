"""HTML tables for notebooks: whole sentences in cells, escaped, with verdict words coloured."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nvfp4lab.records import Verdict
from nvfp4lab.report.digits import digits

if TYPE_CHECKING:
    import pandas as pd  # half a second, which whoever has a frame has spent


class Html(str):
    """HTML text that a notebook shows as HTML when it is the last expression of a cell."""

    def _repr_html_(self) -> str:
        return str(self)


LONGEST_WORD = 34  # letters; flag values are shorter, "experimental_sgl_marlin" has 23
SENTENCE = 60  # letters; a longer cell is prose
VERDICT_WORDS = frozenset(str(verdict) for verdict in Verdict)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table of `rows`; a cell that is exactly a verdict word becomes a badge, everything else is escaped text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    body = "".join(f"<tr>{''.join(map(table_cell, row))}</tr>" for row in rows)
    return Html(
        f'<div class="lab-scroll"><table class="lab-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def of_frame(frame: "pd.DataFrame") -> Html:
    """All of a data frame: pandas hides the middle of many rows or columns, and the end of a long text.

    An index that only counts is left out; any other needs a name.
    """
    told = frame if frame.index.name is None else frame.reset_index()
    known = told.astype(object).where(told.notna(), "")
    return table(list(map(str, told.columns)), (map(_shown, row) for row in known.itertuples(index=False, name=None)))


def _shown(value: object) -> object:
    if isinstance(value, str):
        return value.replace("\n", "\\n")
    return digits(value) if isinstance(value, float) else value


def badge(verdict: object) -> str:
    """A coloured verdict word as HTML."""
    return f'<span class="lab-verdict {html.escape(str(verdict))}">{html.escape(str(verdict))}</span>'


def table_cell(value: object, code: bool = False) -> str:
    """One `<td>`: a badge for a verdict word, escaped text for anything else. Sentences get room; where words are longer than
    any of a language (subjects, commands, hashes) they may break, at a colon, slash or comma first. code: in a fixed-width type."""
    text = "" if value is None else str(value)
    if text in VERDICT_WORDS:
        return f"<td>{badge(text)}</td>"
    shown, room = html.escape(text), ""
    if max(map(len, text.split()), default=0) > LONGEST_WORD:
        shown, room = re.sub(r"([:/,])(?=\S)", r"\1<wbr>", shown), ' class="lab-words"'
    elif len(text) > SENTENCE:
        room = ' class="lab-long"'
    shown = f"<code>{shown}</code>" if code else shown
    return f"<td{room}>{shown}</td>"
