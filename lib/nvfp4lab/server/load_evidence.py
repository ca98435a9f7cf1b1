"""What a load sweep found: one cell per arm, lengths and concurrency, and the evidence that it becomes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvfp4lab import stack
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Number, Verdict, WrongKind
from nvfp4lab.server import load_stats, load_telemetry
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.load import LoadRun
from nvfp4lab.server.load_stats import Compared
from nvfp4lab.server.load_telemetry import Reading
from nvfp4lab.server.params import LoadShape, Slo

NEAR_CEILING = 0.8  # above this share of what the client can do against a stub, the client may be what is measured


@dataclasses.dataclass(frozen=True)
class Void:
    """Why one round of a cell does not count."""

    verdict: Verdict
    reason: str
    kind: WrongKind | None = None


@dataclasses.dataclass
class Cell:
    """One arm at one shape and concurrency, filled round by round. runs: the sound ones, by round."""

    arm: Arm
    shape: LoadShape
    concurrency: int
    ceiling_tok_s: float
    runs: dict[int, LoadRun] = dataclasses.field(default_factory=dict)
    voids: dict[int, Void] = dataclasses.field(default_factory=dict)
    readings: list[Reading] = dataclasses.field(default_factory=list)
    canary_checks: int = 0

    @property
    def sound(self) -> bool:
        """Whether the cell may be quoted: one void round is enough to void it, speed of a wrong server is no speed."""
        return bool(self.runs) and not self.voids

    @property
    def near_ceiling(self) -> bool:
        """Whether the client's own limit is near."""
        return any(run.output_tok_s >= NEAR_CEILING * self.ceiling_tok_s for run in self.runs.values())

    def numbers(self, slo: Slo) -> tuple[Number, ...]:
        """Throughput with its interval, latencies, goodput, telemetry; () without a sound run."""
        runs = [self.runs[number] for number in sorted(self.runs)]
        if not runs:
            return ()
        speed = load_stats.throughput(runs)
        requests = [request for run in runs for request in run.requests]
        return (
            Number("output_tok_s", speed.value, "tok/s", speed.low, speed.high, speed.n),
            Number("requests_s", float(np.mean([run.request_s for run in runs])), "1/s", n=len(runs)),
            Number("goodput_s", float(np.mean([run.goodput_s(slo) for run in runs])), "1/s", n=len(runs)),
            *_quantiles("ttft", [request.ttft_s * 1000 for request in requests]),
            *_quantiles("tpot", [request.tpot_s * 1000 for request in requests]),
            *_quantiles("itl", [gap * 1000 for run in runs for gap in run.itl_s]),
            Number("client_ceiling_tok_s", self.ceiling_tok_s, "tok/s"),
            Number("canary_checks", self.canary_checks, "1"),
            *load_telemetry.numbers(self.readings),
        )

    def evidence(self, slo: Slo, compared: Compared | None, servers_at_once: int = 1) -> Evidence:
        """The cell as one record; a void cell keeps its numbers out of it. servers_at_once: with those that idled beside it."""
        void = next(iter(self.voids.values()), None)
        details = {
            "arm": self.arm.model_dump(exclude_defaults=True),
            "concurrency": self.concurrency,
            **self.shape.model_dump(),
            "rounds": len(self.runs),
            "near_client_ceiling": self.near_ceiling,
        }
        if servers_at_once > 1:
            details["servers_at_once"] = servers_at_once
        if compared is not None:
            ratio = compared.ratio
            details["beside_first_arm"] = {
                "verdict": str(compared.verdict),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
        warning = f"within {1 - NEAR_CEILING:.0%} of the client's own ceiling: the client may be what is measured"
        return Evidence(
            "load",
            f"arm:{self.arm.name}",
            stack.here(),
            stack.capture(),
            void.verdict if void else Verdict.OK,
            f"nvfp4lab run PARAMS --only 32  # arm {self.arm.name}, concurrency {self.concurrency}",
            void.reason if void else (warning if self.near_ceiling else ""),
            void.kind if void else None,
            () if void else self.numbers(slo),
            details=details,
        )


@dataclasses.dataclass
class Table:
    """All cells in the order of arms, shapes, concurrencies; and the arms that were not started at all."""

    p: Params
    cells: list[Cell]
    not_started: list[Evidence]

    def compared(self, cell: Cell) -> Compared | None:
        """Beside the first arm at the same shape and concurrency; None for that arm itself and for void cells."""
        first = next(c for c in self.cells if (c.shape, c.concurrency) == (cell.shape, cell.concurrency))
        rounds = sorted(cell.runs.keys() & first.runs.keys())
        if first is cell or not (first.sound and cell.sound) or not rounds:
            return None
        return load_stats.compare([cell.runs[r] for r in rounds], [first.runs[r] for r in rounds])

    def evidence(self) -> list[Evidence]:
        """One record per cell that was measured or voided, then one per arm that was not started."""
        begun = [cell for cell in self.cells if cell.runs or cell.voids]
        at_once = min(self.p.servers_at_once, len({cell.arm.name for cell in begun}))
        return [cell.evidence(self.p.slo, self.compared(cell), at_once) for cell in begun] + self.not_started


def _quantiles(name: str, values_ms: Sequence[float]) -> tuple[Number, ...]:
    if not values_ms:
        return ()
    middle, high = np.quantile(values_ms, (0.5, 0.99))
    return Number(f"{name}_p50", float(middle), "ms", n=len(values_ms)), Number(f"{name}_p99", float(high), "ms", n=len(values_ms))
