"""Slurm through submitit: one job array for all pieces; submitit requeues what is preempted or timed out.

Hosts share the run folder, as Slurm clusters do; a piece publishes there itself. `cluster="local"` runs the same jobs
as plain processes on this machine, for trying a batch out.
"""

import concurrent.futures
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import submitit

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.executors.local_worker import execute_limited
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict

POLL_S = 0.2
ATTEMPTS = 3


class SlurmExecutor:
    """Submits to `cluster` ("slurm" or "local"); `options` go to submitit (`slurm_partition`, ...)."""

    def __init__(self, cluster: str, **options):
        self.cluster, self.options = cluster, options

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """See `Executor.run`."""
        attempts = {piece.digest: 0 for piece in pieces}
        jobs: dict[submitit.Job, Piece] = {}
        waiting = list(pieces)
        try:
            while waiting or jobs:
                jobs |= dict(zip(self._submit(waiting, run_dir), waiting, strict=True))
                waiting = []
                time.sleep(POLL_S)
                for job in [job for job in jobs if job.done()]:
                    piece = jobs.pop(job)
                    attempts[piece.digest] += 1
                    result = _collect(job, piece, run_dir, final=attempts[piece.digest] >= ATTEMPTS)
                    if result is None:
                        waiting.append(piece)
                    else:
                        yield result
        finally:
            for job in jobs:
                job.cancel()

    def _submit(self, pieces: Sequence[Piece], run_dir: Path) -> list[submitit.Job]:
        """One array for each set of equal needs: an array's jobs ask for the same resources."""
        jobs: dict[str, submitit.Job] = {}
        for needs in {piece.needs for piece in pieces}:
            same = [piece for piece in pieces if piece.needs == needs]
            executor = submitit.AutoExecutor(folder=run_dir / "jobs", cluster=self.cluster)
            limit_min = max(int((piece.timeout_s or 0) // 60) + 2 for piece in same)  # the piece ends itself before
            executor.update_parameters(gpus_per_node=needs.gpus, mem_gb=needs.memory_gib, timeout_min=limit_min, **self.options)
            submitted = executor.map_array(execute_limited, same, [run_dir] * len(same))
            jobs |= {piece.digest: job for piece, job in zip(same, submitted, strict=True)}
        return [jobs[piece.digest] for piece in pieces]


def _collect(job: submitit.Job, piece: Piece, run_dir: Path, final: bool) -> Result | None:
    """The piece's result; None: the job died without one and deserves another attempt."""
    done = pieces_module.published(piece, run_dir)
    if done is not None:
        return done
    try:
        return job.result()
    except (
        submitit.core.utils.UncompletedJobError,
        submitit.core.utils.FailedJobError,
        concurrent.futures.CancelledError,
    ) as error:
        if not final:
            return None
        reason = " ".join(str(error).split())[:300]
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, f"its job died {ATTEMPTS} times: {reason}", 0.0)


def create(cluster: str = "slurm", **options) -> SlurmExecutor:
    """cluster: "slurm", or "local" for processes on this machine. Raises LabError where there is no Slurm."""
    if cluster == "slurm" and shutil.which("srun") is None:
        raise LabError("no Slurm here: srun is not on the PATH; start the run on a login node", exit_code=3)
    return SlurmExecutor(cluster, **options)
