"""The server matrix: every arm of the params gets its turn, its evidence goes to the ledger, tables and KL come from it."""

import dataclasses
from pathlib import Path

import pandas

from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger
from nvfp4lab.server import arms, arms_judge, arms_scores, processes, processes_gpu
from nvfp4lab.server.arms_judge import Finding, Judged
from nvfp4lab.server.arms_scores import Interview
from nvfp4lab.server.launch import Limits, Server


@dataclasses.dataclass(frozen=True)
class Matrix:
    """All arms after their turns. interviews: by arm name, of those that answered."""

    judged: tuple[Judged, ...]
    interviews: dict[str, Interview]

    @property
    def evidence(self) -> list[Evidence]:
        """One record per arm, in the order of the params."""
        return [row.evidence for row in self.judged]

    def canary_table(self) -> pandas.DataFrame:
        """One row per prompt, one column per arm that answered."""
        columns = {name: {a.prompt: _told(a) for a in interview.answers} for name, interview in self.interviews.items()}
        return pandas.DataFrame(columns).rename_axis("prompt")

    def kl_nats(self) -> dict[str, list[float]]:
        """Per arm: KL from the first arm of the params at each scored token; {} when that one did not answer."""
        reference = self.interviews.get(self.judged[0].arm.name)
        others = {name: interview for name, interview in self.interviews.items() if interview is not reference}
        if reference is None:
            return {}
        return {
            name: [kl for p, q in zip(reference.scores, other.scores, strict=True) for kl in arms_scores.kl_by_token(p, q)]
            for name, other in others.items()
        }

    def remains_table(self) -> pandas.DataFrame:
        """What each started arm left behind, and how long start and end took."""
        rows = {row.arm.name: {f"{n.name}, {n.unit}": n.value for n in row.evidence.numbers} for row in self.judged if row.ending}
        return pandas.DataFrame.from_dict(rows, orient="index")


def matrix(p: Params) -> Matrix:
    """Start, question and end every arm of `p` in turn, printing what it does; each record is on disk before the next start.

    Reports what an earlier, killed lab left running in the same run folder, and leaves it alone.
    """
    for left in processes.leftovers(p.run_dir):
        print(
            f"{left.name}: still running from an earlier start (pids {sorted(member.pid for member in left.family())}); left alone"
        )
    limits = Limits(idle_s=p.start_idle_s, spinning_s=p.start_spinning_s)
    planned = arms.plan(p.arms, {}, {}, len(processes_gpu.used_mib()), p.start_on_request)
    ledger, interviews, judged = Ledger(Path(p.run_dir) / "ledger.jsonl"), {}, []

    def ask(server: Server) -> Finding:
        interviews[server.name] = arms_scores.interview(server.url, p.canary_tokens)
        return interviews[server.name].finding()

    for item in planned:
        name = item.arm.name
        row = arms_judge.judge(item, p.run_dir, limits, ask, lambda state, s, name=name: print(f"{name}: {state} after {s:.0f} s"))
        ledger.append(row.evidence)
        print(f"{name}: {row.evidence.verdict} {row.evidence.reason}".rstrip())
        judged.append(row)
    return Matrix(tuple(judged), interviews)


def _told(answer: arms_scores.Answer) -> str:
    return answer.text.strip() if answer.kind is None else f"{answer.text.strip()}  [{answer.kind}: {answer.why}]"
