"""Changes between versions as text and as Markdown."""

from collections.abc import Iterable, Sequence

from nvfp4lab.source.diff import TOPICS, Change, RouteChange
from nvfp4lab.source.routes_query import FLAGS, Route
from nvfp4lab.source.routes_text import markdown_cell


def listing(changes: Iterable[Change | RouteChange], topics: Sequence[str] | None = None) -> str:
    """One line per change under a heading per topic; routes need no heading."""
    lines: list[str] = []
    heading = None
    for change in changes:
        if isinstance(change, RouteChange):
            lines.append(route_line(change))
            continue
        if topics and change.topic not in topics:
            continue
        if change.topic != heading:
            heading = change.topic
            lines.append(f"\n## {heading}")
        lines.append(f"{change.kind:8s} {change.text}")
    return "\n".join(lines) or "no change"


def route_line(change: RouteChange) -> str:
    """`--moe-runner-backend marlin: silently goes elsewhere ... -> works ...`"""
    name = f"{FLAGS[change.op]} {change.backend}" + (f" when {change.when}" if change.when else "")
    return f"{name}: {outcome(change.before)} -> {outcome(change.after)}"


def outcome(route: Route | None) -> str:
    """What a route comes to: the kernel where it works, else what happens instead."""
    if route is None:
        return "no such value"
    return route.final_call if route.expected.startswith("works") else route.expected


def markdown_routes(changes: Iterable[RouteChange]) -> str:
    """Route changes as a table."""
    rows = ["| flag value | before | after |", "|---|---|---|"]
    for change in changes:
        name = f"`{FLAGS[change.op]} {change.backend}`" + (f" when {change.when}" if change.when else "")
        rows.append(f"| {name} | {markdown_cell(outcome(change.before))} | {markdown_cell(outcome(change.after))} |")
    return "\n".join(rows)


def markdown_facts(changes: Iterable[Change], topic: str, first: Sequence[str] = (), limit: int = 30) -> str:
    """Changes of one topic as a list: subjects that hold a word of `first`, then changed values, what came, went, moved."""
    order = ("changed", "removed", "added", "moved")

    def key(change: Change) -> tuple:
        return not any(word in change.subject for word in first), order.index(change.kind)

    rows = sorted((change for change in changes if change.topic == topic), key=key)
    lines = [f"- **{change.kind}** {change.text}" for change in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"- and {len(rows) - limit} more: `nvfp4lab changes --topic {topic}` lists all")
    return "\n".join(lines) or f"- nothing changed in {topic}"


def counts(changes: Iterable[Change]) -> dict[str, dict[str, int]]:
    """{topic: {kind: how many}}, topics in reading order."""
    found: dict[str, dict[str, int]] = {}
    for topic in [*TOPICS, "other"]:
        kinds = [change.kind for change in changes if change.topic == topic]
        if kinds:
            found[topic] = {kind: kinds.count(kind) for kind in ("changed", "added", "removed", "moved")}
    return found
