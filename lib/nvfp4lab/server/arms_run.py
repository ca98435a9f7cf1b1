"""The server matrix: every arm of the params gets its turn; its evidence goes to the ledger, pictures and tables come from it."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pandas

from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger
from nvfp4lab.server import arms_judge, arms_plan, arms_reference, processes, which_kernel_witness
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.arms_ask import AgainstFirst, AgainstReference
from nvfp4lab.server.arms_judge import Finding, Judged
from nvfp4lab.server.launch import Limits, Server


@dataclasses.dataclass(frozen=True)
class Matrix:
    """All arms after their turns. asked: the questions with what was answered."""

    judged: tuple[Judged, ...]
    asked: AgainstReference | AgainstFirst

    @property
    def evidence(self) -> list[Evidence]:
        """One record per arm, in the order of the params."""
        return [row.evidence for row in self.judged]

    def answer_table(self) -> pandas.DataFrame:
        """One row per prompt, one column per arm that answered (and the reference)."""
        return pandas.DataFrame(self.asked.answers).rename_axis("prompt")

    def number_table(self) -> pandas.DataFrame:
        """Every number of every started arm, with its interval where it has one; one column per arm."""
        columns = {
            row.arm.name: {f"{n.name}, {n.unit}": _shown(n.value, n.low, n.high) for n in row.evidence.numbers}
            for row in self.judged
            if row.ending
        }
        return pandas.DataFrame(columns).fillna("")


def matrix(p: Params) -> Matrix:
    """Start, question and end every arm of `p` in turn, printing what it does; each record is on disk before the next start.

    Reports what an earlier, killed lab left running in the same run folder, and leaves it alone.
    """
    for left in processes.leftovers(p.run_dir):
        pids = sorted(member.pid for member in left.family(thorough=True))
        print(f"{left.name}: still running from an earlier start (pids {pids}); left alone")
    limits = Limits(idle_s=p.start_idle_s, spinning_s=p.start_spinning_s)
    planned = arms_plan.of_params(p)
    ask = _questions(p, [item.arm for item in planned if item.start])
    ledger, judged = Ledger(Path(p.run_dir) / "ledger.jsonl"), []
    for item in planned:
        name = item.arm.name
        everything = functools.partial(_with_kernel, ask, item.arm, p)
        row = arms_judge.judge(
            item, p.run_dir, limits, everything, lambda state, s, name=name: print(f"{name}: {state} after {s:.0f} s")
        )
        ledger.append(row.evidence)
        print(f"{name}: {row.evidence.verdict} {row.evidence.reason}".rstrip())
        judged.append(row)
    return Matrix(tuple(judged), ask)


def _with_kernel(ask: Callable[[Server], Finding], arm: Arm, p: Params, server: Server) -> Finding:
    """What `ask` finds, and whether route, log and trace agree on the kernel that ran."""
    finding = ask(server)
    if not p.profile_decode:
        return finding
    agreements = which_kernel_witness.testify(server, arm, p.run_dir)
    void = "; ".join(f"{agreement.operation}: {agreement.why}" for agreement in agreements if not agreement.ok)
    details = {**finding.details, "kernels": [dataclasses.asdict(agreement) for agreement in agreements]}
    return dataclasses.replace(finding, details=details, void=void)


def _questions(p: Params, arms: list[Arm]) -> AgainstReference | AgainstFirst:
    sticks = {arm.name: arms_reference.yardstick(arm.model, p) for arm in arms}
    if all(sticks.values()):
        return AgainstReference(sticks, p.quality_concurrency)
    return AgainstFirst(p.arms[0].name, p.canary_tokens)


def _shown(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.4g}, {high:.4g}]"
