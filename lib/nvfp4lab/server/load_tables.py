"""The load sweep as tables for a reader."""

import pandas

from nvfp4lab.records import Verdict
from nvfp4lab.server.load_evidence import Table


def rows(table: Table) -> pandas.DataFrame:
    """One row per cell: lengths, concurrency, verdict, and each number with its unit in the heading."""
    records = []
    for evidence in table.evidence():
        details = evidence.details
        place = {key: details.get(key) for key in ("input_tokens", "output_tokens", "concurrency")}
        numbers = {f"{number.name}, {number.unit}": round(number.value, 3) for number in evidence.numbers}
        records.append(
            {
                "arm": evidence.subject.removeprefix("arm:"),
                **place,
                "verdict": str(evidence.verdict),
                **numbers,
                "note": evidence.reason,
            }
        )
    return pandas.DataFrame(records).set_index("arm") if records else pandas.DataFrame()


def comparisons(table: Table) -> pandas.DataFrame:
    """One row per cell of every arm but the first: what can be said beside the first."""
    first = table.cells[0].arm.name if table.cells else ""
    records = []
    for cell in table.cells:
        if cell.arm.name != first:
            compared = table.compared(cell)
            said = (str(compared.verdict), compared.why) if compared else (str(Verdict.NOT_RUN), "one of the two rows is void")
            place = {
                "input_tokens": cell.shape.input_tokens,
                "output_tokens": cell.shape.output_tokens,
                "concurrency": cell.concurrency,
            }
            records.append({"arm": cell.arm.name, **place, f"beside {first}": said[0], "ratio": said[1]})
    return pandas.DataFrame(records).set_index("arm") if records else pandas.DataFrame()
