"""Ray and Slurm for real on one machine: a Ray node killed in mid-run, a submitit job killed in mid-run."""

import os
import signal
import threading
from pathlib import Path

import pytest

from nvfp4lab.batch.executors import create
from nvfp4lab.records import Verdict
from toy_pieces import toy


def completed(results) -> dict[str, Verdict]:
    return {result.name: result.verdict for result in results}


@pytest.fixture(scope="module")
def importable_toys():
    """Workers of other processes import `toy_pieces` too."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.__setitem__("PYTHONPATH", before)


@pytest.fixture(scope="module")
def cluster(importable_toys):
    """A Ray cluster of one head, which takes one piece at a time."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)  # a node takes the signal, and keeps it when it is gone
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("collect", [True, False], ids=["no shared storage", "shared storage"])
def test_a_ray_node_killed_in_mid_run_loses_nothing(tmp_path, cluster, collect):
    doomed = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    pieces = [toy(number, sleep_s=0.3) for number in range(16)]
    killer = threading.Timer(1.5, lambda: cluster.remove_node(doomed, allow_graceful=False))
    killer.start()
    verdicts = completed(create("ray", collect=collect).run(pieces, tmp_path))
    killer.join()
    assert verdicts == {piece.name: Verdict.OK for piece in pieces}
    assert all((piece.folder(tmp_path) / "number.txt").read_text() == str(piece.arguments["number"]) for piece in pieces)


def test_a_piece_past_its_limit_is_ended_on_ray_too(tmp_path, cluster):
    verdicts = completed(create("ray").run([toy(1, "hang", timeout_s=2), toy(2)], tmp_path))
    assert verdicts == {"toy-1": Verdict.HANG, "toy-2": Verdict.OK}


def test_a_submitit_job_killed_in_mid_run_is_repeated(tmp_path, importable_toys):
    pytest.importorskip("submitit")
    journal, pids = tmp_path / "journal", tmp_path / "pids"
    pieces = [toy(1, journal=str(journal)), toy(2, "die_until", flags=str(pids), deaths=1, journal=str(journal))]
    pieces.append(toy(3, "hang", timeout_s=2))
    verdicts = completed(create("slurm", cluster="local").run(pieces, tmp_path / "run"))
    assert verdicts == {"toy-1": Verdict.OK, "toy-2": Verdict.OK, "toy-3": Verdict.HANG}
    assert sorted(journal.read_text().split()) == ["1", "2"]
