"""Takes the three testimonies of one running server: route from the ledger, its log, a trace of a decode step."""

import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import requests

from nvfp4lab import stack
from nvfp4lab.records import Evidence, Ledger
from nvfp4lab.server import arms_model, arms_routes, which_kernel
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.launch import Server
from nvfp4lab.server.which_kernel import PLAIN, Agreement, Family, Operation

DECODE_TOKENS = 1024  # seconds on any GPU; the answer is dropped once the trace is there
TRACE_LIMIT_S = 120.0


def operations(fp4_layers: Mapping[str, int]) -> tuple[Operation, ...]:
    """What must be traced for a checkpoint with these FP4 layers by kind (`audit.summarise(...).fp4`)."""
    from nvfp4lab.nvfp4.checkpoint_modules import LayerKind  # torch

    dense = fp4_layers.get(LayerKind.DENSE, 0) + fp4_layers.get(LayerKind.SHARED_EXPERT, 0)
    found = (("fp4_gemm", dense), ("moe", fp4_layers.get(LayerKind.ROUTED_EXPERT, 0)))
    return tuple(operation for operation, layers in found if layers) or (PLAIN,)


def testify(server: Server, arm: Arm, run_dir: Path | str) -> list[Agreement]:
    """One agreement per FP4 operation of the arm's checkpoint; routes come from the run's ledger, the trace stays in `traces/`."""
    from nvfp4lab.nvfp4 import audit  # torch

    fp4_layers = audit.summarise(arms_model.model_folder(arm.model)).fp4
    return agreements(server, arm, fp4_layers, Ledger(Path(run_dir) / "ledger.jsonl"), Path(run_dir) / "traces")


def agreements(
    server: Server, arm: Arm, fp4_layers: Mapping[str, int], records: Iterable[Evidence], folder: Path
) -> list[Agreement]:
    """`testify` with everything given."""
    trace = decode_trace(server.url, folder / arm.name, on_gpu=not arm.on_cpu())
    names = which_kernel.kernel_names(trace) if trace else None
    log, records = server.log_text(), list(records)
    return [
        which_kernel.agreement(
            operation,
            Family.PLAIN if operation == PLAIN else route_family(arm, operation, records),
            which_kernel.of_log(log, operation),
            which_kernel.of_trace(names, operation) if names is not None else None,
        )
        for operation in operations(fp4_layers)
    ]


def route_family(arm: Arm, operation: Operation, records: Iterable[Evidence]) -> Family | None:
    """What the ledger's route record for this arm's flag ends in; None without such a record."""
    flag = arms_routes.asked(arm)[operation]
    ours = [record for record in records if record.stage == "source" and arms_routes.is_about(record, arm)]
    here = (stack.here().cc, stack.capture().sglang)
    about = [r for r in ours if r.subject.startswith(f"{operation}:") and (r.target.cc, r.stack.sglang) == here]
    families = {which_kernel.of_route(record.details, flag) for record in about}
    return families.pop() if len(families) == 1 else None


def decode_trace(url: str, folder: Path, on_gpu: bool) -> Path | None:
    """Trace of a decode step, taken while an answer is being written; None when the server gives none.

    The answer goes on until the trace is there: starting the profiler may take longer than any short answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.rglob("*.json*"))
    asked = {
        "output_dir": str(folder.resolve()),
        "num_steps": 1,
        "activities": ["CPU", "GPU"] if on_gpu else ["CPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    with _Writing(url):
        try:
            requests.post(f"{url}/start_profile", json=asked, timeout=TRACE_LIMIT_S).raise_for_status()
        except requests.RequestException:
            return None
        return _wait_for_trace(folder, before)


class _Writing:
    """Keeps a server decoding in the background while its block runs, which starts with the first token."""

    def __init__(self, url: str):
        self._url = url
        self._first_token, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._first_token.wait(TRACE_LIMIT_S)

    def __exit__(self, *exception) -> None:
        self._over.set()
        self._thread.join(TRACE_LIMIT_S)

    def _write(self) -> None:
        sampling = {"temperature": 0, "max_new_tokens": DECODE_TOKENS, "ignore_eos": True}
        body = {"text": "Once upon a time", "sampling_params": sampling, "stream": True}
        with contextlib.suppress(requests.RequestException):  # whoever asked looks at the server itself
            while not self._over.is_set():
                with requests.post(f"{self._url}/generate", json=body, stream=True, timeout=TRACE_LIMIT_S) as reply:
                    reply.raise_for_status()
                    for _ in reply.iter_lines():
                        self._first_token.set()
                        if self._over.is_set():
                            return  # leaving the block closes the connection, on which SGLang drops the request
        self._first_token.set()


def _wait_for_trace(folder: Path, before: set[Path]) -> Path | None:
    """The first new trace that can be read to its end: the profiler writes it after the step, in the background."""
    deadline = time.monotonic() + TRACE_LIMIT_S
    while time.monotonic() < deadline:
        for path in sorted(set(folder.rglob("*.json*")) - before):
            with contextlib.suppress(OSError, EOFError, ValueError, zlib.error, KeyError):
                if which_kernel.kernel_names(path):
                    return path
        time.sleep(0.5)
    return None
