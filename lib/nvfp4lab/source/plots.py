"""Pictures of stage 1: which backend works on which GPU as far as source shows, one route as a graph, counts of changes."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from nvfp4lab.records import Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, figure
from nvfp4lab.source.routes_query import FLAGS, Gate, Route
from nvfp4lab.source.routes_text import short

# A reading is no verdict: the green of `ok` is not used here.
OUTCOME_COLOURS = {
    "works": "#9BD1EF",
    "works, not enforced": "#D7EBF7",
    "raises": VERDICT_COLOURS[Verdict.UNSUPPORTED],
    "silently goes elsewhere": VERDICT_COLOURS[Verdict.OOM],
    "depends": "#F5EFA0",
}
_GATE_COLOURS = {"met": "#9BD1EF", "failed": VERDICT_COLOURS[Verdict.WRONG], "depends": "#F5EFA0"}
_KIND_COLOURS = dict(zip(("changed", "added", "removed", "moved"), SERIES_COLOURS, strict=False))


def outcome(route: Route) -> str:
    """Key into OUTCOME_COLOURS."""
    word = short(route.expected)
    noted = any(gate.state == "failed" and not gate.refuses for gate in route.gates)
    return "works, not enforced" if word == "works" and noted else word if word in OUTCOME_COLOURS else "depends"


def matrix(routes: Mapping[str, Sequence[Route]], op: str) -> Figure:
    """Backends down, compute capabilities across; the colour says what is expected, the word in the cell where it ends.

    routes: {cc: routes}. Of several routes of `auto`, the one without a model's own rule is shown.
    """
    capabilities = list(routes)
    shown = {cc: {route.backend: route for route in rows if route.op == op} for cc, rows in routes.items()}
    backends = list(dict.fromkeys(name for rows in shown.values() for name in rows))
    picture = figure(2.6 + 1.75 * len(capabilities), 1.0 + 0.34 * len(backends))
    axes = picture.add_subplot()
    for row, backend in enumerate(backends):
        for column, cc in enumerate(capabilities):
            if backend in shown[cc]:
                _cell(axes, column, row, shown[cc][backend])
    axes.set(xlim=(-0.5, len(capabilities) - 0.5), ylim=(len(backends) - 0.5, -0.5), title=f"{FLAGS[op]}, as far as source shows")
    axes.set_xticks(range(len(capabilities)), [f"SM{cc.replace('.', '')}" for cc in capabilities])
    axes.set_yticks(range(len(backends)), backends)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    used = {outcome(route) for rows in shown.values() for route in rows.values()}
    handles = [Patch(color=colour, label=name) for name, colour in OUTCOME_COLOURS.items() if name in used]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return picture


def _cell(axes, column: int, row: int, route: Route) -> None:
    axes.add_patch(Rectangle((column - 0.48, row - 0.45), 0.96, 0.9, color=OUTCOME_COLOURS[outcome(route)]))
    mark = "trap: " if route.traps and not route.raises else ""
    axes.text(column, row, mark + _end(route), ha="center", va="center", fontsize=6.5, weight="bold" if mark else "normal")


def _end(route: Route) -> str:
    """The kernel's own name, or the exception."""
    if route.raises:
        head = route.expected.removeprefix("raises: ").split(":")[0]
        return (
            head
            if " " not in head
            else "refused by FlashInfer"
            if "FlashInfer" in route.expected
            else "no GPU code"
            if "compiles" in head
            else "refused"
        )
    if route.final_call == "not found":
        return "left to a2a or model"
    name = route.final_call.removesuffix(".run").rsplit(".", 1)[-1]
    return textwrap.shorten(name.replace("_", " "), 30, placeholder="…").replace(" ", "_")


def route_graph(route: Route, gates: int = 12) -> Figure:
    """One route from top to bottom: hops with file:line on the left, the gates on the way on the right.

    At most `gates` gates are drawn, failed ones first, then those that FlashInfer decides.
    """
    chosen = sorted(route.gates, key=_interest)[:gates]
    rows = max(len(route.hops), len(chosen))
    picture = figure(11, 1.2 + 0.62 * rows)
    axes = picture.add_subplot()
    for index, hop in enumerate(route.hops):
        _box(axes, 0, index, f"{hop.why}", f"{_tail(hop.file)}:{hop.line}", "#EAEAEA" if index else "#CFE3F5")
        if index:
            axes.annotate("", (2.5, index - 0.36), (2.5, index - 0.62), arrowprops={"arrowstyle": "-|>", "color": "#444444"})
    for index, gate in enumerate(chosen):
        _box(
            axes,
            5.6,
            index,
            gate.text.removeprefix("depends on "),
            f"{gate.state}  {_tail(gate.file)}:{gate.line}",
            _gate_colour(gate),
        )
    left_out = len(route.gates) - len(chosen)
    more = f"; `nvfp4lab routes --backend {route.backend}` lists {left_out} more gates" if left_out else ""
    title = f"{FLAGS[route.op]} {route.backend}: {textwrap.shorten(route.expected, 120, placeholder='…')}{more}"
    axes.set_title(title, fontsize=9, loc="left")
    axes.set(xlim=(-0.1, 11), ylim=(rows - 0.4, -0.6))
    axes.axis("off")
    return picture


def _interest(gate: Gate) -> tuple[int, int]:
    return ({"failed": 0, "met": 1, "depends": 2}[gate.state], not gate.file.startswith("flashinfer"))


def _gate_colour(gate: Gate) -> str:
    return OUTCOME_COLOURS["works, not enforced"] if gate.state == "failed" and not gate.refuses else _GATE_COLOURS[gate.state]


def _tail(file: str) -> str:
    return "/".join(file.split("/")[-2:])


def _box(axes, left: float, row: int, text: str, place: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch((left, row - 0.33), 5.1, 0.66, boxstyle="round,pad=0.02", facecolor=colour, edgecolor="#777777", lw=0.6)
    )
    axes.text(left + 0.08, row - 0.13, textwrap.shorten(text, 80, placeholder="…"), fontsize=7.5, va="center")
    axes.text(left + 0.08, row + 0.17, place, fontsize=6.5, va="center", color="#444444", family="monospace")


def change_counts(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Figure:
    """Stacked bars of changes by topic, one panel per pair of versions. found: {title: {topic: {kind: count}}}."""
    picture = figure(9, 1.2 + 0.3 * sum(len(topics) for topics in found.values()))
    heights = [max(len(topics), 1) for topics in found.values()]
    panels = picture.subplots(len(found), squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (title, topics) in zip(panels[:, 0], found.items(), strict=True):
        names, left = list(topics), [0] * len(topics)
        for kind, colour in _KIND_COLOURS.items():
            widths = [topics[name].get(kind, 0) for name in names]
            axes.barh(names, widths, left=left, color=colour, label=kind, height=0.7)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, ncols=4, fontsize=8)
    panels[-1, 0].set_xlabel("facts")
    return picture
