"""What a server's life becomes as evidence, and that a matrix goes on where it stopped."""

import os
import sys
import threading
from pathlib import Path

import pytest
import requests

from nvfp4lab import params
from nvfp4lab.errors import LabError
from nvfp4lab.records import Ledger, Number, Verdict, WrongKind
from nvfp4lab.server import arms_ask, arms_judge, arms_plan, arms_resume, arms_run, arms_scores
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.arms_plan import Planned
from nvfp4lab.server.launch import Limits, Outcome, Server
from nvfp4lab.server.states import State

FAKE = Path(__file__).with_name("launch_fake_server.py")
LIMITS = Limits(idle_s=30, spinning_s=30, term_s=0.3, release_s=5, poll_s=0.02, health_s=5)
HANGING = Limits(idle_s=1.5, term_s=0.3, poll_s=0.02)


@pytest.fixture
def fakes(monkeypatch):
    """Arms whose `model` names the behaviour of a fake server; the starts made are collected."""
    started = []

    def server_of(arm, run_dir, limits, on_state=lambda *_: None, gpus=None):
        started.append(arm.name)
        return Server(
            arm.name,
            lambda port: [sys.executable, "-I", "-S", str(FAKE), str(port), arm.model],
            os.environ,
            run_dir,
            HANGING if arm.model == "hangs" else LIMITS,
            on_state,
        )

    monkeypatch.setattr(arms_judge, "server_of", server_of)
    return started


def judge(mode: str, run_dir: Path, ask) -> arms_judge.Judged:
    return arms_judge.judge([Planned(Arm(name="x", model=mode), True)], run_dir, LIMITS, lambda arm, server: ask(server))[0]


def test_a_sound_server_is_ok_and_its_record_says_how_long_and_what_was_left(tmp_path, fakes):
    evidence = judge("healthy", tmp_path, lambda server: Finding(numbers=(Number("asked", 1, "1"),))).evidence
    assert (evidence.verdict, evidence.stage, evidence.subject) == (Verdict.OK, "server", "arm:x")
    assert evidence.number("time_to_ready").value > 0 and evidence.number("asked").value == 1
    assert [evidence.number(name).value for name in ("left_processes", "left_ports", "left_gpu")] == [0, 0, 0]
    assert "ready" in [state for state, _ in evidence.details["timeline"]]
    assert (tmp_path / evidence.artefacts[0]).is_file()


def test_a_wrong_answer_is_wrong_and_a_void_one_is_no_result(tmp_path, fakes):
    wrong = judge("healthy", tmp_path, lambda server: Finding(WrongKind.NAN, "null log-probabilities")).evidence
    assert (wrong.verdict, wrong.kind, wrong.reason) == (Verdict.WRONG, WrongKind.NAN, "null log-probabilities")
    void = judge("healthy", tmp_path, lambda server: Finding(void="moe: another kernel ran")).evidence
    assert (void.verdict, void.reason) == (Verdict.NOT_RUN, "answered right, but moe: another kernel ran")


def broken(server):
    raise requests.ConnectionError("connection reset")


@pytest.mark.parametrize("error", [LabError("HTTP 500"), KeyError("meta_info"), ValueError("no JSON")])
def test_an_answer_that_is_none_is_wrong_and_does_not_stop_the_matrix(tmp_path, fakes, error):
    def ask(server):
        raise error

    evidence = judge("healthy", tmp_path, ask).evidence
    assert (evidence.verdict, evidence.kind) == (Verdict.WRONG, WrongKind.GARBAGE) and type(error).__name__ in evidence.reason


def test_a_server_that_dies_while_it_is_asked_is_a_crash_whatever_was_answered(tmp_path, fakes):
    def ask_a_dying_server(server):
        while server.lost() is None:
            pass
        return Finding()

    for ask in (ask_a_dying_server, lambda server: ask_a_dying_server(server) and broken(server)):
        evidence = judge("dies_late", tmp_path, ask).evidence
        assert evidence.verdict is Verdict.CRASH and "exit code 7 while it was being questioned" in evidence.reason


CRASH_LOG = (
    "[2026-11-29 12:04:59 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/sglang/srt/managers/scheduler.py", line 2621, in run_batch',
    "    result = self.forward(batch)",
    "{}",
    "[2026-11-29 12:05:00] Received sigquit from a child process. It usually means the child failed.",
)


def say(server, line: str) -> None:
    with server.outcome.log.open("a") as log:
        log.write("\n".join(CRASH_LOG).format(line) + "\n")


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Verdict.OOM),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Verdict.CRASH),
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", Verdict.CRASH),
        ("RuntimeError: flux capacitor misaligned", Verdict.CRASH),
    ],
)
def test_why_a_server_died_while_it_was_asked_is_what_its_log_says(tmp_path, fakes, line, verdict):
    def ask(server):
        say(server, line)
        while server.lost() is None:
            pass
        return broken(server)

    evidence = judge("dies_late", tmp_path, ask).evidence
    assert evidence.verdict is verdict and evidence.reason.endswith(f"exit code 7 while it was being questioned: {line}")
    assert evidence.details["classification"]["line"] == line


def silent(server):
    raise requests.ReadTimeout("read timeout=600")


def test_a_server_that_listens_and_does_not_answer_hangs(tmp_path, fakes):
    evidence = judge("healthy", tmp_path, silent).evidence
    assert evidence.verdict is Verdict.HANG and evidence.reason == (
        "the server lives and listens, but does not answer (read timeout=600)"
    )


def test_an_http_error_over_a_nan_is_a_nan(tmp_path, fakes):
    def ask(server):
        with server.outcome.log.open("a") as log:
            log.write("ValueError: Out of range float values are not JSON compliant: nan\n")
        raise LabError("HTTP 500")

    evidence = judge("healthy", tmp_path, ask).evidence
    assert (evidence.verdict, evidence.kind) == (Verdict.WRONG, WrongKind.NAN)
    assert evidence.reason == "LabError: HTTP 500: ValueError: Out of range float values are not JSON compliant: nan"


def test_a_server_that_lives_but_breaks_its_answers_is_wrong(tmp_path, fakes):
    evidence = judge("healthy", tmp_path, broken).evidence
    assert (evidence.verdict, evidence.kind) == (Verdict.WRONG, WrongKind.GARBAGE)
    assert "connection reset" in evidence.reason


@pytest.mark.parametrize(
    ("mode", "verdict", "told"),
    [
        ("dies_at_start", Verdict.CRASH, "exit code 1"),
        ("killed_at_start", Verdict.CRASH, "signal 11"),
        ("hangs", Verdict.HANG, "no log line"),
    ],
)
def test_a_failed_start_has_a_verdict_and_a_reason(tmp_path, fakes, mode, verdict, told):
    evidence = judge(mode, tmp_path, broken).evidence
    assert evidence.verdict is verdict or (mode == "dies_at_start" and evidence.verdict is Verdict.UNSUPPORTED)
    assert told in evidence.reason
    assert evidence.details["classification"]["verdict"]


def test_a_start_that_the_machine_spoilt_is_not_run_and_so_tried_again(tmp_path):
    """Seen when a dozen servers were started at once: an ephemeral port was gone when SGLang came to listen on it."""
    log = tmp_path / "x.log"
    log.write_text("Traceback (most recent call last):\ntorch.distributed.DistNetworkError: code: -98, name: EADDRINUSE\n")
    outcome = Outcome("x", State.FAILED, "the server ended, exit code 1", 1, 2.0, (), log, "serve")
    verdict, reason, _ = arms_judge.why_failed(outcome)
    assert verdict is Verdict.NOT_RUN and "EADDRINUSE" in reason
    log.write_text("Load weight begin\n")
    assert arms_judge.why_failed(outcome)[0] is Verdict.CRASH, "a log without a failure does not acquit a server that ended"


def test_a_refusal_is_told_in_the_servers_own_words_first(root):
    """The log of a real refusal: SGLang raises, then kills its own processes; a reader wants the first."""
    log = root / "outputs/examples/h200/logs/moe-nvfp4-triton.log"
    ended = "the server ended before it was ready, killed by signal 9, which the lab did not send"
    verdict, reason, _ = arms_judge.why_failed(Outcome("x", State.FAILED, ended, -9, 2.0, (), log, "serve"))
    assert verdict is Verdict.UNSUPPORTED
    assert reason.startswith("ValueError: Current platform does not support NVFP4") and reason.endswith(f" ({ended})")


def test_a_model_that_is_no_checkpoint_is_not_run_with_the_reason(tmp_path):
    evidence = arms_judge.judge([Planned(Arm(name="x", model="/no/such/model"), True)], tmp_path, LIMITS, broken)[0].evidence
    assert evidence.verdict is Verdict.NOT_RUN and "/no/such/model: neither a checkpoint folder" in evidence.reason


@pytest.fixture
def matrix_of(monkeypatch, fakes):
    """`arms_run.matrix` with fake servers, questions and plan."""

    class Questions(arms_ask.AgainstFirst):
        def __call__(self, server):
            self.told[server.name] = {"scores": [[[[1, -0.1], [2, -2.5]]]], "answers": {"q": server.name}}
            return Finding()

    monkeypatch.setattr(arms_run, "_questions", lambda p, arms: Questions("a", 1))
    monkeypatch.setattr(arms_plan, "of_params", lambda p: arms_plan.plan(p.arms, 0, {"refused": "raises"}))
    return arms_run.matrix


def test_a_matrix_goes_on_where_it_stopped(tmp_path, fakes, matrix_of):
    arms = [{"name": "a", "model": "healthy"}, {"name": "refused", "model": "healthy"}, {"name": "b", "model": "dies_at_start"}]
    p = params.check({"run_dir": str(tmp_path), "profile_decode": False, "arms": arms[:2]}, "test")
    first = matrix_of(p)
    assert fakes == ["a"] and [row.verdict for row in first.evidence] == [Verdict.OK, Verdict.NOT_RUN]
    both = matrix_of(params.check({"run_dir": str(tmp_path), "profile_decode": False, "arms": arms}, "test"))
    assert fakes == ["a", "b"], "the finished arm was started again"
    assert [row.verdict is Verdict.OK for row in both.evidence] == [True, False, False]
    assert both.asked.answers() == {"a": {"q": "a"}}, "the answers of the finished arm are not in the picture"
    assert len([row for row in Ledger(tmp_path / "ledger.jsonl") if row.subject == "arm:a"]) == 1
    changed = params.check({"run_dir": str(tmp_path), "profile_decode": False, "canary_tokens": 3, "arms": arms[:1]}, "test")
    matrix_of(changed)
    assert fakes == ["a", "b", "a"], "other questions need another start"


def test_answers_stand_in_the_order_of_the_arms_whoever_answered_first(tmp_path, fakes, matrix_of, monkeypatch):
    ready = threading.Event()

    def ask(self, server):
        if server.name == "a":
            assert ready.wait(20)
        self.told[server.name] = {"scores": [], "answers": {"q": server.name}}
        ready.set()
        return Finding()

    monkeypatch.setattr(arms_ask.AgainstFirst, "__call__", ask)
    monkeypatch.setattr(arms_run, "_questions", lambda p, arms: arms_ask.AgainstFirst("a", 1))
    given = {"run_dir": str(tmp_path), "profile_decode": False, "servers_at_once": 2}
    arms = [{"name": name, "model": "healthy", "flags": [f"--{name}"]} for name in "ab"]
    made = matrix_of(params.check(given | {"arms": arms}, "test"))
    assert list(made.answer_table().columns) == ["a", "b"]
    assert list(made.number_table()["servers at once"]) == ["2", "2"]


def test_an_arm_that_was_not_run_is_tried_again(tmp_path, fakes, matrix_of, monkeypatch):
    arms = [{"name": "refused", "model": "healthy"}]
    p = params.check({"run_dir": str(tmp_path), "profile_decode": False, "arms": arms}, "test")
    assert matrix_of(p).evidence[0].verdict is Verdict.NOT_RUN
    monkeypatch.setattr(arms_plan, "of_params", lambda p: arms_plan.plan(p.arms, 0))
    assert matrix_of(p).evidence[0].verdict is Verdict.OK and fakes == ["refused"]


def test_tables_have_each_started_arm(tmp_path, fakes, matrix_of):
    p = params.check({"run_dir": str(tmp_path), "profile_decode": False, "arms": [{"name": "a", "model": "healthy"}]}, "test")
    made = matrix_of(p)
    assert list(made.number_table().index) == list(made.answer_table().columns) == ["a"]
    assert made.number_table().loc["a", "left_processes, 1"] == "0"


def test_arms_are_compared_with_the_first_on_the_same_tokens():
    asked = arms_ask.AgainstFirst("a", 1)
    near, far = [[1, -0.1], [2, -2.5]], [[1, -2.5], [2, -0.1]]
    asked.told = {"a": {"scores": [[near, near]]}, "same": {"scores": [[near, near]]}, "far": {"scores": [[near, far]]}}
    distances = asked.kl_nats()
    assert distances["same"] == [0.0, 0.0] and distances["far"][0] == 0.0 and distances["far"][1] > 1.5
    del asked.told["a"]
    assert asked.kl_nats() == {}


def test_kl_is_a_lower_bound_that_counts_what_only_one_side_lists():
    import math

    reference, other = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.5), 3: math.log(0.5)}
    assert arms_scores.kl_nats(reference, reference) == 0.0
    assert arms_scores.kl_nats(reference, other) == pytest.approx(0.0), "merged into one bucket the two are equal"
    skewed = {1: math.log(0.9), 2: math.log(0.1)}
    assert arms_scores.kl_nats(reference, skewed) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))


def test_the_key_of_an_arm_changes_with_arm_questions_and_stack():
    from nvfp4lab.records import Stack

    arm, p = Arm(name="a", model="m"), params.check({}, "test")
    base = arms_resume.key_of(arm, p, Stack(sglang="1"))
    assert base == arms_resume.key_of(arm, params.check({"restarts": 3}, "test"), Stack(sglang="1", lab_commit="x"))
    others = [
        arms_resume.key_of(Arm(name="a", model="m", tp=2), p, Stack(sglang="1")),
        arms_resume.key_of(arm, params.check({"quality_answer_tokens": 9}, "test"), Stack(sglang="1")),
        arms_resume.key_of(arm, p, Stack(sglang="2")),
    ]
    assert len({base, *others}) == 4
