"""One look for every picture: verdict colours and a figure factory. Colours: Okabe and Ito, safe for colour-blind readers."""

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


def figure(width_in: float = 7.5, height_in: float = 3.5) -> Figure:
    """An empty Figure (inches) that renders alike in a notebook and headless; it is not registered with pyplot."""
    return Figure(figsize=(width_in, height_in), dpi=110, layout="constrained")
