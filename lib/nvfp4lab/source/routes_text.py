"""Routes as text: the listing of the command line and the tables of the notebooks."""

import itertools
import re
from collections.abc import Iterable

from nvfp4lab.source.index import Index
from nvfp4lab.source.routes_query import FLAGS, LOST_ENUM, Query, Route


def listing(routes: Iterable[Route], query: Query, names: str) -> str:
    """All traps first, then one block per route."""
    routes = list(routes)
    asked = f"{names}, compute capability {query.cc}, {query.quant}, a2a {query.a2a}, tp {query.tp}, ep {query.ep}"
    flag = f"--quantization {'given' if query.flag_given else 'not given'}, model {query.model_arch or 'any'}"
    lines = [f"{asked}, {flag}", "", *traps(routes), ""]
    for route in routes:
        lines += [*block(route), ""]
    return "\n".join(lines)


def traps(routes: Iterable[Route]) -> list[str]:
    """One line per kind of trap; values of one flag that share a trap stand in one line. A flag that could not be read says so."""
    routes = list(routes)
    unread = dict.fromkeys(FLAGS[route.op] for route in routes if route.expected == LOST_ENUM)
    kinds: dict[tuple[str, str], list[str]] = {}
    for route in routes:
        for trap in route.traps:
            flag = FLAGS[route.op]
            kinds.setdefault((flag, trap.removeprefix(f"{flag} {route.backend} ")), []).append(route.backend)
    lines = [f"TRAP  {flag} {', '.join(dict.fromkeys(names))}: {said}" for (flag, said), names in kinds.items()]
    lines = [f"NOT READ  {flag}: the enum of its backends was not found, so no trap could be looked for" for flag in unread] + lines
    return lines or ["no trap found"]


def block(route: Route) -> list[str]:
    """One route: what is expected, where it ends, the hops, the gates."""
    when = f"  when {route.condition}" if route.when else ""
    lines = [f"{FLAGS[route.op]} {route.backend}{when}", f"  expected: {route.expected}", f"  final call: {route.final_call}"]
    lines += [f"    {hop.file}:{hop.line}  {hop.why}" for hop in route.hops]
    lines += [f"    [{gate.state}] {gate.text.removeprefix('depends on ')}  ({gate.file}:{gate.line})" for gate in route.gates]
    return lines


def short(expected: str) -> str:
    """The word before the colon: works, raises, silently goes elsewhere, depends."""
    return expected.split(":")[0].split(" as far")[0].split(" on ")[0]


def markdown_traps(routes: Iterable[Route]) -> str:
    """Traps as a Markdown list."""
    return "\n".join(line.replace("TRAP  ", "- **trap** ", 1) for line in traps(routes))


def markdown_table(routes: Iterable[Route]) -> str:
    """One table a flag and one row a route, for a notebook. What raises has no final call; the page wraps names at their dots."""
    lines: list[str] = []
    for op, group in itertools.groupby(routes, key=lambda route: route.op):
        lines += [f"**{FLAGS[op]}**", "", "| value | expected | final call | when |", "|---|---|---|---|"]
        for route in group:
            final = "" if route.raises else markdown_cell(route.final_call)
            lines.append(f"| `{route.backend}` | {markdown_cell(route.expected)} | {final} | {markdown_cell(route.condition)} |")
        lines.append("")
    return "\n".join(lines)


def markdown_cell(text: str) -> str:
    """`text` for a cell of a Markdown table: in one line, and a dotted name may break at its dots."""
    return re.sub(r"(?<=\w)\.(?=\w)", ".<wbr>", text.replace("|", "\\|").replace("\n", " "))


def most_telling(routes: Iterable[Route]) -> Route:
    """The route to draw: of the MoE values that work, one with decided gates and many hops; any, where none works."""

    def key(route: Route) -> tuple:
        decided = any(gate.state != "depends" for gate in route.gates)
        plain = route.backend != "auto" and not route.backend.startswith("experimental")
        return route.op == "moe", short(route.expected) == "works", decided, plain, len(route.hops)

    return max(routes, key=key)


def evidence(index: Index, route: Route, around: int = 1) -> str:
    """The source lines of each hop as the wheel has them, `around` lines on either side, the hop's own line marked."""
    blocks = []
    for hop in route.hops:
        if not hop.file.endswith(".py"):
            continue
        lines = index.text(hop.file).splitlines()
        first, last = max(hop.line - around, 1), min(hop.line + around, len(lines))
        shown = [f"{'>' if number == hop.line else ' '} {number:5d}  {lines[number - 1]}" for number in range(first, last + 1)]
        blocks.append("\n".join([f"# {hop.why}", hop.file, *shown]))
    return "\n\n".join(blocks)
