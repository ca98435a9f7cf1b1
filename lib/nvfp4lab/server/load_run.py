"""The load sweep: arms by prompt and answer length by concurrency, every arm restarted in turn with the others.

Order: first the client's own ceiling against a stub; then round by round each arm once, rotated so that no arm is always
the one that runs on a cold machine. A run counts only if every canary asked meanwhile was right and every request was
answered in full.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvfp4lab import stack
from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Ledger, Verdict, WrongKind
from nvfp4lab.server import arms_judge, arms_model, arms_plan, load, together, which_kernel_witness
from nvfp4lab.server.arms import Arm, environment_here
from nvfp4lab.server.arms_plan import Planned
from nvfp4lab.server.launch import Limits, Server, StartFailed
from nvfp4lab.server.load import Client, LoadRun
from nvfp4lab.server.load_canary import CanaryWatch, Checks, canary_for
from nvfp4lab.server.load_evidence import Cell, Table, Void
from nvfp4lab.server.load_store import Store
from nvfp4lab.server.load_telemetry import Telemetry
from nvfp4lab.server.params import LoadShape
from nvfp4lab.server.quality_canary import Fault

# Requests against the stub. A run of 10 to 30 ms gave 17,000 tok/s one time and 41,000 the next; these take half a second or more.
CEILING_TOKENS, CEILING_REQUESTS, CEILING_PER_SLOT = 16_384, 1024, 8


def sweep(p: Params) -> Table:
    """Measure every arm of `p`, printing each run; the evidence of all is in the ledger when it returns.

    Each finished run is on disk at once and is not repeated by a later call with the same run folder. Ctrl-C or a failing
    client still leaves the evidence of what was finished. Raises LabError when the client cannot run.
    """
    planned = [_with_model(item) for item in arms_plan.of_params(p)]
    startable = [item.arm for item in planned if item.start]
    table = Table(p, [], [arms_judge.not_run(item.arm, item.reason) for item in planned if not item.start])
    try:
        if startable:
            canaries = {arm.name: canary_for(arm, p) for arm in startable}
            with Client(p.run_dir, environment_here()) as client:
                _Sweep(p, client, Store(p, stack.capture()), canaries, table).run(startable)
    finally:
        Ledger(Path(p.run_dir) / "ledger.jsonl").append(*table.evidence())
    return table


def _with_model(planned: Planned) -> Planned:
    """`planned`, not to be started when its model is not there."""
    try:
        arms_model.model_folder(planned.arm.model)
    except LabError as error:
        return dataclasses.replace(planned, start=False, reason=planned.reason or str(error))
    return planned


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of a round: each arm comes first equally often."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def ceiling_requests(shape: LoadShape, concurrency: int) -> int:
    """How many requests make a run against the stub long enough to be believed; short answers cost a request each."""
    enough = -(-CEILING_TOKENS // shape.output_tokens)
    return max(CEILING_PER_SLOT * concurrency, min(enough, CEILING_REQUESTS))


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """One sweep under way."""

    p: Params
    client: Client
    store: Store
    canaries: Mapping[str, Checks]
    table: Table

    def run(self, arms: Sequence[Arm]) -> None:
        """The ceiling, then every round. A void cell is not measured again: one void round voids it."""
        ceilings = self._ceilings(arms_model.model_folder(arms[0].model))
        self.table.cells += [Cell(arm, *place, tok_s) for arm in arms for place, tok_s in ceilings.items()]
        for number in range(self.p.restarts):
            missing, size = self._missing(rotated(arms, number), number), self.p.servers_at_once
            for first in range(0, len(missing), size):
                self._round(number, missing[first : first + size])

    def _missing(self, arms: Sequence[Arm], number: int) -> list[tuple[Arm, list[Cell]]]:
        """The arms of this round with their cells that nobody has measured and nothing has voided."""
        found = []
        for arm in arms:
            ours = [cell for cell in self.table.cells if cell.arm is arm and not cell.voids]
            if missing := [cell for cell in ours if not self.store.recall(cell, number)]:
                found.append((arm, missing))
        return found

    def _ceilings(self, tokenizer: Path) -> dict[tuple[LoadShape, int], float]:
        """Output tokens per second that the client can take from a server that answers at once."""
        found = {}
        with load.stub_server() as url:
            for shape, concurrency in itertools.product(self.p.load_shapes, self.p.concurrencies):
                run = self.client.run(url, tokenizer, shape, concurrency, ceiling_requests(shape, concurrency), seed=0)
                found[shape, concurrency] = run.output_tok_s
                print(f"client alone, {_words(shape, concurrency)}: {run.output_tok_s:,.0f} tok/s")
        return found

    def _round(self, number: int, group: Sequence[tuple[Arm, Sequence[Cell]]]) -> None:
        """One start of these arms, side by side; then one after the other is measured in all its cells, the others idle."""
        limits = Limits(idle_s=self.p.start_idle_s, spinning_s=self.p.start_spinning_s)
        gpus = together.gpus_of([arm.gpus() for arm, _ in group])
        servers = {
            arm.name: arms_judge.server_of(arm, self.p.run_dir, limits, gpus=given)
            for (arm, _), given in zip(group, gpus, strict=True)
        }
        with together.up(list(servers.values())) as failures:
            for arm, cells in group:
                if arm.name in failures:
                    self._void(number, cells, failures[arm.name])
                else:
                    self._measured(number, servers[arm.name], arm, cells)

    def _void(self, number: int, cells: Sequence[Cell], error: StartFailed) -> None:
        verdict, reason, _ = arms_judge.why_failed(error.outcome)
        for cell in cells:
            cell.voids[number] = Void(verdict, reason)
            self.store.keep(cell, number)
        print(f"round {number + 1}, {error.outcome.name}: {verdict}, {reason}")

    def _measured(self, number: int, server: Server, arm: Arm, cells: Sequence[Cell]) -> None:
        name = f"round {number + 1}, {arm.name}"
        print(f"{name}: ready after {server.outcome.seconds:.0f} s")
        unclear = self._unclear_kernel(server, arm) if number == 0 else None
        for cell in cells:
            self._measure(number, server, cell, unclear or _gone(server, "under an earlier load"))
            print(f"{name}, {_words(cell.shape, cell.concurrency)}: {_told(cell, number)}")

    def _unclear_kernel(self, server: Server, arm: Arm) -> Void | None:
        """Why nobody can say which kernel a row would be about; None when the witnesses agree or are not asked."""
        agreements = which_kernel_witness.testify(server, arm, self.p.run_dir) if self.p.profile_decode else []
        bad = next((agreement for agreement in agreements if not agreement.ok), None)
        return Void(Verdict.NOT_RUN, f"{bad.operation}: {bad.why}") if bad else None

    def _measure(self, number: int, server: Server, cell: Cell, void: Void | None) -> None:
        """Measure `cell` unless it is known to be `void`; what came of it is on disk when this returns."""
        if void is None:
            run, void = self._loaded(number, server, cell)
        if void:
            cell.voids[number] = void
        else:
            cell.runs[number] = run
        self.store.keep(cell, number)

    def _loaded(self, number: int, server: Server, cell: Cell) -> tuple[LoadRun | None, Void | None]:
        """The run of one cell under canaries, and why it does not count (None: it does)."""
        requests = self.p.prompts_per_slot * cell.concurrency
        folder = arms_model.model_folder(cell.arm.model)
        own = Telemetry(server.env, cell.arm.gpus())
        with own as telemetry, CanaryWatch(self.canaries[cell.arm.name], server.url) as watch:
            try:
                run, failed = self.client.run(server.url, folder, cell.shape, cell.concurrency, requests, seed=1 + number), None
            except LabError as error:
                run, failed = None, str(error)
        cell.canary_checks += watch.asked
        cell.readings += telemetry.readings
        return run, _gone(server, "under load") or _why_void(watch.fault, failed, run)


def _gone(server: Server, when: str) -> Void | None:
    lost = server.lost()
    return Void(*arms_judge.why_lost(server, f"{lost} {when}")[:2]) if lost else None


def _why_void(fault: Fault | None, failed: str | None, run: LoadRun | None) -> Void | None:
    """The gravest reason not to count a run: canary silent or wrong, client failed, requests unanswered or cut short."""
    if fault:
        return Void(Verdict.WRONG if fault.kind else Verdict.HANG, f"canary under load: {fault.what}", fault.kind)
    if failed:
        return Void(Verdict.NOT_RUN, failed)
    if run.unanswered():
        return Void(Verdict.CRASH, run.unanswered())
    return Void(Verdict.WRONG, run.cut_short(), WrongKind.GARBAGE) if run.cut_short() else None


def _told(cell: Cell, number: int) -> str:
    void = cell.voids.get(number)
    return f"void, {void.reason}" if void else f"{cell.runs[number].output_tok_s:,.1f} tok/s"


def _words(shape: LoadShape, concurrency: int) -> str:
    return f"{shape.input_tokens}+{shape.output_tokens} tokens, concurrency {concurrency}"
