"""A Ray cluster: each piece is one Ray task. Ray schedules, and repeats a task whose worker or node died.

Hosts need the lab and Python packages only, no shared storage: a task executes its piece in a scratch folder of its
host and returns the published folder as bytes. Start a node that can take pieces for one kind of GPU with
`ray start --resources '{"cc_12.0": 8}'`; a piece that needs cc 12.0 asks for one of it.
"""

import io
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.batch.unpack import unpack_piece
from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict

COLLECT_EVERY_S = 0.1  # one question about all tasks costs more than the pieces of a large batch, asked after each
RETRIES = 3  # attempts after the first, each only when a worker or node died


class RayExecutor:
    """Runs pieces on the cluster at `address` ("auto": the one this host belongs to; "local": one started here)."""

    def __init__(self, address: str):
        self.address = address

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """See `Executor.run`."""
        self._connect()
        pending = {_submit(piece): piece for piece in pieces}
        try:
            while pending:
                finished, _ = ray.wait(list(pending), num_returns=len(pending), timeout=COLLECT_EVERY_S)
                for task in finished:
                    yield _collect(task, pending.pop(task), run_dir)
        finally:
            for task in pending:
                ray.cancel(task, force=True)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        address = None if self.address == "local" else self.address
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RayError) as error:
            raise LabError(
                f"no Ray cluster at {self.address!r}: start one with `ray start --head` ({error})", exit_code=3
            ) from error


@ray.remote(max_retries=RETRIES, retry_exceptions=False)
def _execute(piece: Piece) -> bytes:
    with tempfile.TemporaryDirectory(prefix="nvfp4lab-piece-") as scratch:
        pieces_module.execute(piece, Path(scratch))
        return pieces_module.pack(piece.folder(Path(scratch)))


def _submit(piece: Piece) -> ray.ObjectRef:
    resources = {f"cc_{piece.needs.cc}": 1} if piece.needs.cc else {}
    options = {"num_cpus": 1, "num_gpus": piece.needs.gpus, "memory": int(piece.needs.memory_gib * 2**30), "resources": resources}
    return _execute.options(name=piece.name, **options).remote(piece)


def _collect(task: ray.ObjectRef, piece: Piece, run_dir: Path) -> Result:
    try:
        content = ray.get(task)
    except RayTaskError as error:  # the task itself raised: the host could not write
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, f"its host failed: {error.cause}", 0.0)
    except RayError as error:  # every attempt lost its worker or node
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, f"no attempt came to an end: {type(error).__name__}", 0.0)
    return unpack_piece(zipfile.ZipFile(io.BytesIO(content)), piece, run_dir)


def create(address: str = "auto") -> RayExecutor:
    """address: as `ray.init` takes it, or "local" for a cluster that lives as long as this process."""
    return RayExecutor(address)
