"""A piece has one result whatever happens to the processes around it."""

import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nvfp4lab import cli
from nvfp4lab.batch import cleanup
from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch import run as coordinator
from nvfp4lab.batch.executors import create
from nvfp4lab.batch.piece import Needs, Result
from nvfp4lab.batch.plan import Plan
from nvfp4lab.errors import LabError
from nvfp4lab.records import Ledger, Verdict
from toy_pieces import toy


def by_name(results) -> dict[str, Result]:
    return {result.name: result for result in results}


def local_workers() -> list[psutil.Process]:
    """Processes of the local engine that this test has started."""
    found = psutil.process_iter(["cmdline", "ppid"])
    return [one for one in found if one.info["ppid"] == os.getpid() and "spawn_main" in " ".join(one.info["cmdline"] or ())]


def test_the_digest_follows_the_content():
    assert toy(1).digest == toy(1).digest
    assert len({toy(1).digest, toy(2).digest, toy(1, entry="fail").digest, toy(1, sleep_s=1).digest}) == 4


def test_a_piece_is_executed_once_and_its_folder_is_whole(tmp_path):
    journal = tmp_path / "journal"
    piece = toy(1, journal=str(journal))
    first = pieces_module.execute(piece, tmp_path)
    assert pieces_module.execute(piece, tmp_path) == first
    assert journal.read_text() == "1\n"
    assert (piece.folder(tmp_path) / "number.txt").read_text() == "1"
    assert pieces_module.unfinished_attempts(tmp_path) == []


def test_local_workers_end_in_every_way_and_only_their_own_piece_suffers(tmp_path):
    pieces = [
        toy(1),
        toy(2, "fail"),
        toy(3, "die_until", flags=str(tmp_path / "two"), deaths=2),
        toy(4, "die_until", flags=str(tmp_path / "many"), deaths=99, signal=signal.SIGSEGV),
        toy(5, "hang", timeout_s=3),
        toy(6, needs=Needs(gpus=64, memory_gib=0.1)),
        toy(7),
        toy(8, "die_until", flags=str(tmp_path / "killed"), deaths=99),
        toy(9, "die_until", flags=str(tmp_path / "asked"), deaths=99, signal=signal.SIGTERM),
    ]
    results = by_name(create("local", workers=2).run(pieces, tmp_path))
    verdicts = {name: result.verdict for name, result in results.items()}
    assert verdicts == {
        "toy-1": Verdict.OK,
        "toy-2": Verdict.CRASH,
        "toy-3": Verdict.OK,
        "toy-4": Verdict.CRASH,
        "toy-5": Verdict.HANG,
        "toy-6": Verdict.NOT_RUN,
        "toy-7": Verdict.OK,
        "toy-8": Verdict.NOT_RUN,
        "toy-9": Verdict.NOT_RUN,
    }
    assert "no such luck" in results["toy-2"].reason
    assert re.fullmatch(
        r"needs 64 GPUs and 0\.1 GiB of memory; \d+ GPUs? and \d+\.\d GiB are free on this machine", results["toy-6"].reason
    )
    assert "died 3 times, the last time with exit status -11" in results["toy-4"].reason
    assert "killed 3 times" in results["toy-8"].reason
    assert pieces_module.published(pieces[7], tmp_path) is None, "who was killed from outside runs again on resume"
    assert "64 GPUs" in results["toy-6"].reason
    assert pieces_module.published(pieces[4], tmp_path) == results["toy-5"]


@pytest.mark.timeout(60)
def test_a_worker_killed_with_every_shared_lock_in_its_hand_stops_nobody(tmp_path):
    """A queue that workers share has such a lock: concurrent.futures declares its pool broken, Pebble's waits for ever."""
    first = toy(0, "die_with_locks", flag=str(tmp_path / "flag"))
    results = create("local", workers=2).run([first, *(toy(number, sleep_s=0.05) for number in range(1, 10))], tmp_path)
    assert {result.name: result.verdict for result in results} == {f"toy-{number}": Verdict.OK for number in range(10)}


@pytest.mark.timeout(60)
def test_workers_killed_again_and_again_lose_nothing(tmp_path):
    """Short pieces, so that many a kill falls on a start, a hand-over or a result; each piece is then done once."""
    pieces = [toy(number, sleep_s=0.004, journal=str(tmp_path / "journal")) for number in range(300)]
    chance, results, kills = random.Random(5), [], 0
    for result in create("local", workers=2).run(pieces, tmp_path):
        results.append(result)
        if len(results) % 20 == 0 and (workers := local_workers()):
            time.sleep(chance.uniform(0, 0.01))
            with contextlib.suppress(psutil.NoSuchProcess):  # its slot has ended or replaced it meanwhile
                chance.choice(workers).kill()
                kills += 1
    assert kills >= 10
    assert {result.name: result.verdict for result in results} == {piece.name: Verdict.OK for piece in pieces}
    assert len(results) == len(pieces)
    assert pieces_module.unfinished_attempts(tmp_path) != [], "no kill fell on a piece at work"


@pytest.mark.timeout(60)
def test_workers_that_cannot_start_are_the_machines_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4lab.batch.executors.local_worker._serve", os.abort)
    with pytest.raises(LabError, match="5 times before it could begin") as caught:
        list(create("local", workers=2).run([toy(1), toy(2)], tmp_path))
    assert caught.value.exit_code == 3
    assert local_workers() == []


@pytest.mark.timeout(60)
def test_a_worker_that_ends_itself_is_noticed(tmp_path):
    results = by_name(create("local", workers=2).run([toy(1, "end_itself"), toy(2, "leave"), toy(3)], tmp_path))
    assert [results[f"toy-{number}"].verdict for number in (1, 2, 3)] == [Verdict.CRASH, Verdict.CRASH, Verdict.OK]
    assert "exit status 0" in results["toy-1"].reason
    assert results["toy-2"].reason == "SystemExit: 3"


def test_a_server_of_a_piece_past_its_limit_is_ended(tmp_path):
    piece = toy(1, "serve_and_hang", timeout_s=4)
    [result] = create("local", workers=1).run([piece], tmp_path)
    assert result.verdict is Verdict.HANG
    assert '"guarded"' in (piece.folder(tmp_path) / "servers.jsonl").read_text(), "the server had not started"
    assert [found for found in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(found.info["cmdline"] or ())] == []


def test_a_closed_iterator_stops_what_still_runs(tmp_path):
    results = create("local", workers=2).run([toy(1), toy(2, "hang"), toy(3, "hang"), toy(4)], tmp_path)
    assert next(results).name == "toy-1"
    results.close()
    assert local_workers() == []
    assert pieces_module.published(toy(4), tmp_path) is None


def test_what_a_worker_cannot_write_is_raised_here(tmp_path):
    (tmp_path / "run").write_text("a file where a folder must be")
    with pytest.raises(NotADirectoryError):
        list(create("local", workers=2).run([toy(1), toy(2)], tmp_path / "run"))
    assert local_workers() == []


def test_a_piece_sees_its_own_gpus_and_not_those_of_the_piece_before(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("nvfp4lab.server.processes_gpu.visible", lambda: [("4", None), ("7", None)])
    pieces = [toy(number, "see", needs=Needs(gpus=gpus, memory_gib=0.1)) for number, gpus in enumerate((2, 0, 1))]
    results = by_name(create("local", workers=1).run(pieces, tmp_path))
    assert [results[f"toy-{number}"].reason for number in range(3)] == ["4,7", "whatever is there", "4"]


def test_a_result_published_before_its_process_died_counts(tmp_path):
    piece = toy(1)
    done = pieces_module.execute(piece, tmp_path)
    assert cleanup.publish_failure(piece, tmp_path, Verdict.HANG, "too late") == done
    assert pieces_module.published(piece, tmp_path) == done


def test_an_unknown_engine_is_named():
    with pytest.raises(LabError, match="local, ray, slurm"):
        create("kubernetes")


def test_exit_codes_tell_the_four_ends_apart():
    ok = Result("a", "1", Verdict.OK, "", 1.0)
    crash = Result("b", "2", Verdict.CRASH, "x", 1.0)
    skipped = Result("c", "3", Verdict.NOT_RUN, "x", 1.0)
    assert coordinator.Summary((ok,), (), False).exit_code == 0
    assert coordinator.Summary((ok, crash), (), False).exit_code == 1
    assert coordinator.Summary((ok, skipped), (), False).exit_code == 2
    assert coordinator.Summary((ok,), (), True).exit_code == 2


@pytest.mark.parametrize(("held", "said"), [("plan.json", "add --resume"), ("ledger.jsonl", "records of work by hand")])
def test_a_folder_that_holds_something_already_is_left_alone(tmp_path, capsys, held, said):
    (tmp_path / held).write_text("{}\n")
    (tmp_path / "p.yaml").write_text("notebooks: [00_start_here]\n")
    assert cli.main(["run", str(tmp_path / "p.yaml"), "--out", str(tmp_path)]) != 0
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([held, "p.yaml"])
    assert (tmp_path / held).read_text() == "{}\n"


def test_resume_repeats_nothing_finished_and_retry_repeats_what_failed(tmp_path):
    journal = tmp_path / "journal"
    plan = Plan("toys", ((toy(1, journal=str(journal)), toy(2, "fail")), (toy(3, journal=str(journal)),)))
    engine = create("local", workers=1)
    assert coordinator.run(plan, tmp_path / "run", engine).exit_code == 1
    assert coordinator.run(plan, tmp_path / "run", engine).exit_code == 1
    assert journal.read_text().split() == ["1", "3"]
    coordinator.run(plan, tmp_path / "run", engine, retry_failed=True)
    assert journal.read_text().split() == ["1", "3"]
    assert len(list((tmp_path / "run" / "pieces").glob("*.retired-*"))) == 1


@pytest.mark.parametrize(
    ("backend", "code"),
    [("emulation.gemm_float16", 0), ("emulation.gemm_float32", 1), ("torch.reference_gemm", 1), ("flashinfer.mm_fp4.cudnn", 1)],
)
def test_an_emulation_that_must_be_wrong_makes_no_run_fail(tmp_path, backend, code):
    """Notebook 22 without a GPU shows by them that the gate is awake; every such run had ended with exit code 1."""
    piece = toy(1, "testify", subject=f"gemm:{backend}:exact_t24:m1n16k16", verdict="wrong", kind="garbage")
    assert coordinator.run(Plan("toys", ((piece,),)), tmp_path / "run", create("local", workers=1)).exit_code == code


def test_asking_again_for_one_notebook_loses_no_other(tmp_path):
    """As `--only 22`, `--only 31` and `--only 40` into one folder."""
    engine, run_dir = create("local", workers=1), tmp_path / "run"

    def subjects() -> list[str]:
        return [record.subject for record in Ledger(run_dir / "ledger.jsonl")]

    assert coordinator.run(Plan("toys", ((toy(1, "testify", verdict="hang"), toy(2, "testify")),)), run_dir, engine).exit_code == 1
    again = coordinator.run(Plan("toys", ((toy(2, "testify", note="asked otherwise"), toy(3, "testify")),)), run_dir, engine)
    assert again.exit_code == 0  # what was not asked for now is not judged now
    assert subjects() == ["toy:1", "toy:2", "toy:3"]  # one of toy 2: a newer digest takes the place of the older
    page = (run_dir / "index.html").read_text()
    assert all(f"toy-{number}" in page for number in (1, 2, 3))


COORDINATE = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from toy_pieces import toy
from nvfp4lab.batch import run as coordinator
from nvfp4lab.batch.executors import create
from nvfp4lab.batch.plan import Plan
if __name__ == "__main__":
    journal = str(Path({run!r}).parent / "journal")
    plan = Plan("toys", (tuple(toy(n, sleep_s=0.05, journal=journal) for n in range(40)),))
    sys.exit(coordinator.run(plan, Path({run!r}), create("local", workers=2)).exit_code)
"""


def assert_repeated_only_if_lost(folder: Path) -> None:
    """Every toy noted itself once, but for attempts cut off between their last line and their publication."""
    noted = collections.Counter(folder.joinpath("journal").read_text().split())
    lost = collections.Counter(path.read_text() for path in folder.glob("run/pieces/*.lost-*/number.txt"))
    assert set(noted) == {str(number) for number in range(40)}
    assert noted - lost <= collections.Counter(set(noted))


@pytest.mark.timeout(900)
def test_killed_at_random_moments_every_piece_still_has_one_result(tmp_path):
    """SIGKILL of the runner or of one of its workers, again and again, then one run to the end."""
    script = tmp_path / "coordinate.py"
    script.write_text(COORDINATE.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run")))
    chance = random.Random(4)
    kills = 0
    for _ in range(8):
        runner = psutil.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 2.0))
        workers = runner.children(recursive=True)
        victim = chance.choice([runner, *workers])
        if victim.is_running():
            victim.kill()
            kills += 1
        if victim is runner:
            _, alive = psutil.wait_procs(workers, timeout=10)
            assert alive == [], "a worker outlived its runner"
        if runner.wait(timeout=60) == 0:
            break
    assert kills > 0
    assert subprocess.run([sys.executable, str(script)], timeout=120, check=False).returncode == 0
    results = [json.loads(path.read_text()) for path in (tmp_path / "run" / "pieces").glob("????????????????/result.json")]
    assert sorted(row["name"] for row in results) == sorted(f"toy-{n}" for n in range(40))
    assert {row["verdict"] for row in results} == {"ok"}
    assert pieces_module.unfinished_attempts(tmp_path / "run") == []
    assert_repeated_only_if_lost(tmp_path)


def test_ctrl_c_leaves_a_resumable_run(tmp_path):
    script = tmp_path / "coordinate.py"
    script.write_text(COORDINATE.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run")))
    runner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "run" / "pieces").glob("*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait(timeout=30) == 2
    assert subprocess.run([sys.executable, str(script)], timeout=120, check=False).returncode == 0
    assert_repeated_only_if_lost(tmp_path)
