"""The server matrix: every arm of the params gets its turn; its evidence goes to the ledger, pictures and tables come from it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas

from nvfp4lab import stack
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger
from nvfp4lab.report.digits import interval
from nvfp4lab.report.style import LabFigure
from nvfp4lab.server import arms_judge, arms_plan, arms_reference, arms_resume, plots, processes, which_kernel_witness
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.arms_ask import AgainstFirst, AgainstReference
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.arms_plan import Planned
from nvfp4lab.server.launch import Limits, Server


@dataclasses.dataclass(frozen=True)
class Matrix:
    """All arms after their turns. evidence: one record per arm, in the order of the params. asked: questions and answers."""

    evidence: tuple[Evidence, ...]
    asked: AgainstReference | AgainstFirst

    def token_kl(self) -> LabFigure:
        """How far each arm is from the reference, token by token."""
        return plots.token_kl(self.asked.kl_nats(), self.asked.perfect_kl_nats(), self.asked.reference)

    def answer_table(self) -> pandas.DataFrame:
        """One row per prompt, one column per arm that answered (and the reference)."""
        return pandas.DataFrame(self.asked.answers()).rename_axis("prompt")

    def number_table(self) -> pandas.DataFrame:
        """Every number of every arm, with its interval where it has one; one row per arm that was started."""
        rows = {
            record.subject.removeprefix("arm:"): {"servers at once": str(1 + len(record.details.get("side_by_side", ())))}
            | {f"{n.name}, {n.unit}": interval(n, with_unit=False) for n in record.numbers}
            for record in self.evidence
            if record.numbers
        }
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("arm").fillna("")


def matrix(p: Params) -> Matrix:
    """Start, question and end every arm of `p` in turn, printing what it does; each record is on disk before the next turn.

    An arm with a record in this run folder (same arm, questions and stack) is not started again. What an earlier, killed
    lab left running here is reported and left alone.
    """
    for left in processes.leftovers(p.run_dir):
        pids = sorted(member.pid for member in left.family(thorough=True))
        print(f"{left.name}: still running from an earlier start (pids {pids}); left alone")
    planned = arms_plan.of_params(p)
    ask = _questions(p, [item.arm for item in planned if item.start])
    ledger, captured = Ledger(Path(p.run_dir) / "ledger.jsonl"), stack.capture()
    keys = {item.arm.name: arms_resume.key_of(item.arm, p, captured) for item in planned}
    done = arms_resume.finished(ledger)
    records = {name: _remembered(done[key], ask, p, key) for name, key in keys.items() if key in done}
    todo = [item for item in planned if item.arm.name not in records]
    for group in _groups(todo, p.servers_at_once):
        records |= {evidence.subject.removeprefix("arm:"): evidence for evidence in _turn(group, ask, p, keys, ledger)}
    ask.told = {name: ask.told[name] for name in keys if name in ask.told}  # side by side they answer in any order
    return Matrix(tuple(records[item.arm.name] for item in planned), ask)


def _groups(planned: Sequence[Planned], size: int) -> list[list[Planned]]:
    """In order, `size` arms that are started in each; those that are not started go with the ones before them."""
    groups, starting = [[]], 0
    for item in planned:
        if item.start and starting == size:
            groups.append([])
            starting = 0
        groups[-1].append(item)
        starting += item.start
    return groups


def _turn(
    group: Sequence[Planned], ask: AgainstReference | AgainstFirst, p: Params, keys: Mapping[str, str], ledger: Ledger
) -> list[Evidence]:
    """One turn of arms that run side by side; their answers and then their records are on disk when this returns."""
    limits = Limits(idle_s=p.start_idle_s, spinning_s=p.start_spinning_s)
    everything = functools.partial(_with_kernel, ask, p)
    rows = arms_judge.judge(
        group, p.run_dir, limits, everything, lambda arm, state, seconds: print(f"{arm.name}: {state} after {seconds:.0f} s")
    )
    records = []
    for name, evidence in ((row.arm.name, row.evidence) for row in rows):
        records.append(dataclasses.replace(evidence, details={**evidence.details, "key": keys[name]}))
        if name in ask.told:
            arms_resume.keep(p.run_dir, keys[name], ask.told[name])
        print(f"{name}: {evidence.verdict} {evidence.reason}".rstrip())
    ledger.append(*records)
    return records


def _remembered(evidence: Evidence, ask: AgainstReference | AgainstFirst, p: Params, key: str) -> Evidence:
    """The record of an earlier turn; its answers are put where the pictures look for them."""
    name = evidence.subject.removeprefix("arm:")
    told = arms_resume.kept(p.run_dir, key)
    if told is not None:
        ask.told[name] = told
    print(f"{name}: {evidence.verdict} (judged {evidence.written_at[:16]}, not started again)")
    return evidence


def _with_kernel(ask: Callable[[Server], Finding], p: Params, arm: Arm, server: Server) -> Finding:
    """What `ask` finds, and whether route, log and trace agree on the kernel that ran."""
    finding = ask(server)
    if not p.profile_decode:
        return finding
    agreements = which_kernel_witness.testify(server, arm, p.run_dir)
    void = "; ".join(f"{agreement.operation}: {agreement.why}" for agreement in agreements if not agreement.ok)
    details = {**finding.details, "kernels": [dataclasses.asdict(agreement) for agreement in agreements]}
    return dataclasses.replace(finding, details=details, void=void)


def _questions(p: Params, arms: list[Arm]) -> AgainstReference | AgainstFirst:
    found = {arm.name: arms_reference.yardstick(arm, p) for arm in arms}
    sticks = {name: stick for name, stick in found.items() if stick is not None}
    if sticks:
        return AgainstReference(sticks, p.quality_concurrency, p.canary_tokens)
    return AgainstFirst(p.arms[0].name, p.canary_tokens)
