"""A Ray cluster: each piece is one Ray task. Ray schedules, and repeats a task whose worker or node died.

Hosts need the lab and Python packages only. A host that sees the run folder works in it; any other executes its piece
in a scratch folder and returns the published folder as bytes. Start a node that can take pieces for one kind of GPU with
`ray start --resources '{"cc_12.0": 8}'`; a piece that needs cc 12.0 asks for one of it.
"""

import io
import pickle
import secrets
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.executors.local_worker import execute_limited
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.batch.unpack import unpack_piece
from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict

COLLECT_EVERY_S = 0.5  # one question about all tasks costs more than the pieces of a large batch, asked after each
RETRIES = 3  # attempts after the first, each only when a worker or node died


class RayExecutor:
    """Runs pieces on the cluster at `address` ("auto": the one this host belongs to; "local": one started here).

    collect: results come back through Ray even from hosts that see the run folder.
    """

    def __init__(self, address: str, collect: bool):
        self.address, self.collect = address, collect

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """See `Executor.run`."""
        self._connect()
        token = run_dir / f".shared-{secrets.token_hex(8)}"
        if not self.collect:
            token.touch()
        pending = {_submit(piece, token): piece for piece in pieces}
        try:
            while pending:
                finished, _ = ray.wait(list(pending), num_returns=len(pending), timeout=COLLECT_EVERY_S)
                for task in finished:
                    yield _collect(task, pending.pop(task), run_dir)
        finally:
            for task in pending:
                ray.cancel(task, force=True)
            token.unlink(missing_ok=True)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        address = None if self.address == "local" else self.address
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except Exception as error:  # Ray raises plain ones too, as when a node does not start in time
            raise LabError(
                f"no Ray cluster at {self.address!r}: start one with `ray start --head` ({error})", exit_code=3
            ) from error


@ray.remote(max_retries=RETRIES, retry_exceptions=False)
def _execute(work: bytes) -> bytes:
    """Pickled (piece, token) to a pickled Result, or to the pickled bytes of the published folder.

    Bytes pass through Ray as they are; as objects the two cost half a millisecond a task.
    """
    piece, token = pickle.loads(work)
    return pickle.dumps(_executed(piece, token))


def _executed(piece: Piece, token: Path) -> Result | bytes:
    if token.exists():
        return execute_limited(piece, token.parent)
    with tempfile.TemporaryDirectory(prefix="nvfp4lab-piece-") as scratch:
        result = execute_limited(piece, Path(scratch))
        return result if result.verdict is Verdict.NOT_RUN else pieces_module.pack(piece.folder(Path(scratch)))


def _submit(piece: Piece, token: Path) -> ray.ObjectRef:
    resources = {f"cc_{piece.needs.cc}": 1} if piece.needs.cc else {}
    options = {"num_cpus": 1, "num_gpus": piece.needs.gpus, "memory": int(piece.needs.memory_gib * 2**30), "resources": resources}
    return _execute.options(name=piece.name, **options).remote(pickle.dumps((piece, token)))


def _collect(task: ray.ObjectRef, piece: Piece, run_dir: Path) -> Result:
    try:
        returned = pickle.loads(ray.get(task))
    except RayTaskError as error:  # the task itself raised: the host could not write
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, f"its host failed: {error.cause}", 0.0)
    except RayError as error:  # every attempt lost its worker or node
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, f"no attempt came to an end: {type(error).__name__}", 0.0)
    return returned if isinstance(returned, Result) else unpack_piece(zipfile.ZipFile(io.BytesIO(returned)), piece, run_dir)


def create(address: str = "auto", collect: bool = False) -> RayExecutor:
    """address: as `ray.init` takes it, or "local" for a cluster that lives as long as this process. collect: see the class."""
    return RayExecutor(address, collect)
