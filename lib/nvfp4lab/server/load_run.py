"""The load sweep: arms by prompt and answer length by concurrency, every arm restarted in turn with the others.

Order: first the client's own ceiling against a stub; then round by round each arm once, rotated so that no arm is always
the one that runs on a cold machine. A run counts only if every canary asked meanwhile was right and every request was
answered in full.
"""

from collections.abc import Sequence
from pathlib import Path

from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Ledger, Verdict, WrongKind
from nvfp4lab.server import arms_judge, arms_model, arms_plan, load, which_kernel_witness
from nvfp4lab.server.arms import Arm, environment_here
from nvfp4lab.server.launch import Limits, Server, StartFailed
from nvfp4lab.server.load import Client, LoadRun
from nvfp4lab.server.load_canary import CanaryWatch, Checks, canary_for
from nvfp4lab.server.load_evidence import Cell, Table, Void
from nvfp4lab.server.load_telemetry import Telemetry
from nvfp4lab.server.params import LoadShape

CEILING_REQUESTS = 8  # per request in flight, against the stub: seconds of time, long enough to be steady


def sweep(p: Params) -> Table:
    """Measure every arm of `p`, printing each run; the evidence of all is in the ledger when it returns.

    Ctrl-C or a failing client still leaves the finished rounds in the ledger. Raises LabError when the client cannot run.
    """
    planned = arms_plan.of_params(p)
    startable = [item.arm for item in planned if item.start]
    table = Table(p, [], [arms_judge.not_run(item.arm, item.reason) for item in planned if not item.start])
    try:
        if startable:
            canaries = {arm.name: canary_for(arm, p) for arm in startable}
            with Client(p.run_dir, environment_here()) as client:
                ceilings = _ceilings(client, p, arms_model.model_folder(startable[0].model))
                table.cells += [Cell(arm, shape, c, tok_s) for arm in startable for (shape, c), tok_s in ceilings.items()]
                for number in range(p.restarts):
                    for arm in rotated(startable, number):
                        _round(p, client, canaries[arm.name], number, arm, [cell for cell in table.cells if cell.arm is arm])
    finally:
        Ledger(Path(p.run_dir) / "ledger.jsonl").append(*table.evidence())
    return table


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of a round: each arm comes first equally often."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def _ceilings(client: Client, p: Params, tokenizer: Path) -> dict[tuple[LoadShape, int], float]:
    """Output tokens per second that the client can take from a server that answers at once."""
    found = {}
    with load.stub_server() as url:
        for shape in p.load_shapes:
            for concurrency in p.concurrencies:
                run = client.run(url, tokenizer, shape, concurrency, CEILING_REQUESTS * concurrency, seed=0)
                found[shape, concurrency] = run.output_tok_s
                print(f"client alone, {_words(shape, concurrency)}: {run.output_tok_s:,.0f} tok/s")
    return found


def _round(p: Params, client: Client, canary: Checks, number: int, arm: Arm, cells: Sequence[Cell]) -> None:
    """One start of one arm, measured in all its cells."""
    limits = Limits(idle_s=p.start_idle_s, spinning_s=p.start_spinning_s)
    try:
        with arms_judge.server_of(arm, p.run_dir, limits) as server:
            print(f"round {number + 1}, {arm.name}: ready after {server.outcome.seconds:.0f} s")
            unclear = _unclear_kernel(p, server, arm) if number == 0 else None
            for cell in cells:
                if unclear:
                    cell.voids[number] = unclear
                    continue
                _measure(p, client, canary, number, server, cell)
                print(f"round {number + 1}, {arm.name}, {_words(cell.shape, cell.concurrency)}: {_told(cell, number)}")
    except StartFailed as error:
        verdict, reason, _ = arms_judge.why_failed(error.outcome)
        for cell in cells:
            cell.voids[number] = Void(verdict, reason)
        print(f"round {number + 1}, {arm.name}: {verdict}, {reason}")


def _unclear_kernel(p: Params, server: Server, arm: Arm) -> Void | None:
    """Why nobody can say which kernel a row would be about; None when the witnesses agree or are not asked."""
    agreements = which_kernel_witness.testify(server, arm, p.run_dir) if p.profile_decode else []
    bad = next((agreement for agreement in agreements if not agreement.ok), None)
    return Void(Verdict.NOT_RUN, f"{bad.operation}: {bad.why}") if bad else None


def _measure(p: Params, client: Client, canary: Checks, number: int, server: Server, cell: Cell) -> None:
    requests = p.prompts_per_slot * cell.concurrency
    folder = arms_model.model_folder(cell.arm.model)
    with Telemetry() as telemetry, CanaryWatch(canary, server.url) as watch:
        try:
            run, failed = client.run(server.url, folder, cell.shape, cell.concurrency, requests, seed=1 + number), None
        except LabError as error:
            run, failed = None, str(error)
    cell.canary_checks += watch.asked
    cell.readings += telemetry.readings
    void = _why_void(server.lost(), watch.fault, failed, run)
    if void:
        cell.voids[number] = void
    else:
        cell.runs[number] = run


def _why_void(lost: str | None, wrong: str | None, failed: str | None, run: LoadRun | None) -> Void | None:
    """The gravest reason not to count a run: server gone, wrong canary, client failed, requests unanswered or cut short."""
    if lost:
        return Void(Verdict.CRASH, f"{lost} under load")
    if wrong:
        return Void(Verdict.WRONG, f"canary under load: {wrong}", WrongKind.GARBAGE)
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
