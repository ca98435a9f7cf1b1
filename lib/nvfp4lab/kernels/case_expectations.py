"""What stage 1 read in the source beside what the kernel did: agreement is silent, a mismatch is flagged."""

import dataclasses
from collections.abc import Iterable, Sequence

from nvfp4lab.kernels.case_report import backend_of
from nvfp4lab.kernels.flag_values import FLAG_OF
from nvfp4lab.records import Evidence, Verdict


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One kernel for which source and run disagree. expected, seen: in the words of the two records."""

    backend: str
    flag: str
    expected: str
    seen: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.flag})\n  source: {self.expected}\n  seen:   {self.seen}"


def mismatches(kernel_rows: Sequence[Evidence], source_rows: Iterable[Evidence]) -> list[Mismatch]:
    """Kernels that ran where SGLang's source raises, and kernels that did not where it shows a way.

    What a kernel refuses at one shape and runs at another contradicts no reading: source says nothing of shapes. Only records
    of one compute capability and one SGLang version are set beside each other; what was not run says nothing.
    """
    found = []
    expected = {_key(row): row for row in source_rows if row.stage == "source" and not row.details.get("when")}
    for backend in dict.fromkeys(backend_of(row) for row in kernel_rows):
        rows = [row for row in kernel_rows if backend_of(row) == backend and row.verdict is not Verdict.NOT_RUN]
        if not rows or backend not in FLAG_OF:
            continue
        op, value = FLAG_OF[backend]
        source = expected.get((op, value, rows[0].target.cc, rows[0].stack.sglang))
        if source is None:
            continue
        ran = next((row for row in rows if row.verdict in (Verdict.OK, Verdict.WRONG)), None)
        failed = (Verdict.CRASH, Verdict.HANG) if ran else (Verdict.UNSUPPORTED, Verdict.CRASH, Verdict.HANG)
        refused = next((row for row in rows if row.verdict in failed), None)
        raises = source.verdict is Verdict.UNSUPPORTED
        contrary = ran if raises else refused
        if contrary is not None:
            flag = f"--{'moe-runner' if op == 'moe' else 'fp4-gemm'}-backend {value}"
            found.append(
                Mismatch(backend, flag, source.reason, f"{contrary.verdict} {contrary.subject} {contrary.reason}".rstrip())
            )
    return found


def _key(row: Evidence) -> tuple[str, str, str, str | None]:
    op, value, *_ = row.subject.split(":")
    return op, value, row.target.cc, row.stack.sglang
