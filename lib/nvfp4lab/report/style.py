"""One look for every picture: verdict colours and a figure factory. Colours: Okabe and Ito, safe for colour-blind readers."""

import io

from matplotlib.figure import Figure

from nvfp4lab.records import Verdict

VERDICT_COLOURS: dict[Verdict, str] = {
    Verdict.OK: "#009E73",
    Verdict.WRONG: "#D55E00",
    Verdict.CRASH: "#882255",
    Verdict.HANG: "#CC79A7",
    Verdict.UNSUPPORTED: "#BBBBBB",
    Verdict.OOM: "#E69F00",
    Verdict.NOT_RUN: "#F0F0F0",
}
SERIES_COLOURS: tuple[str, ...] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class LabFigure(Figure):
    """A Figure that a notebook shows as the last expression of a cell, with a description for those who cannot see it.

    It needs no pyplot and keeps no global state. `alt`: the description; empty: the titles of its axes.
    """

    alt = ""

    def _repr_mimebundle_(self, include=None, exclude=None):
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", facecolor="white")
        titles = [text.get_text() for text in (self._suptitle, *(axes.title for axes in self.axes)) if text and text.get_text()]
        alt = " ".join((self.alt or "; ".join(titles)).split())
        return {"image/png": buffer.getvalue(), "text/plain": alt}, {"image/png": {"alt": alt} if alt else {}}


def figure(width_in: float = 7.5, height_in: float = 3.5, alt: str = "") -> LabFigure:
    """An empty figure (inches) that renders alike in a notebook and headless; it is not registered with pyplot."""
    made = LabFigure(figsize=(width_in, height_in), dpi=110, layout="constrained")
    made.alt = alt
    return made
