"""The load sweep as tables for a reader."""

from nvfp4lab.records import Verdict
from nvfp4lab.report.digits import interval
from nvfp4lab.report.tables import Html, table
from nvfp4lab.server.load_evidence import Cell, Table

_PLACE = ("input_tokens", "output_tokens", "concurrency")


def rows(found: Table) -> Html:
    """One row per cell: lengths, concurrency, verdict, and each number with its unit in the heading and its interval, if any."""
    records = found.evidence()
    names = list(dict.fromkeys((number.name, number.unit) for record in records for number in record.numbers))
    return table(
        ("arm", *_PLACE, "verdict", *(f"{name}, {unit}" for name, unit in names), "note"),
        (
            (
                record.subject.removeprefix("arm:"),
                *(record.details.get(key) for key in _PLACE),
                record.verdict,
                *((number := record.number(name)) and interval(number, with_unit=False) for name, _ in names),
                record.reason,
            )
            for record in records
        ),
    )


def comparisons(found: Table) -> Html:
    """One row per cell of every arm but the first: what can be said beside the first."""
    first = found.cells[0].arm.name if found.cells else "the first"
    others = [cell for cell in found.cells if cell.arm.name != first]
    return table(
        ("arm", *_PLACE, f"beside {first}", "ratio", "95 % interval", "starts", "why"),
        (
            (cell.arm.name, cell.shape.input_tokens, cell.shape.output_tokens, cell.concurrency, *_beside(found, cell))
            for cell in others
        ),
    )


def _beside(found: Table, cell: Cell) -> tuple:
    compared = found.compared(cell)
    if compared is None:
        return Verdict.NOT_RUN, "", "", "", "one of the two rows is void"
    ratio = compared.ratio
    bounds = f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.n > 1 else "unknown"
    return compared.verdict, f"{ratio.value:.3f}", bounds, ratio.n, compared.why
