"""One real SGLang server on this CPU: started, asked, traced, ended (the demo loads one). Skipped where SGLang is not installed."""

import importlib.util
from pathlib import Path

import pytest

from nvfp4lab.server import arms_judge, arms_scores, which_kernel_witness
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.launch import Limits
from nvfp4lab.server.states import State

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

ARM = Arm(name="bf16", model="smol-bf16", device="cpu")
DAYS = ("Monday, Tuesday, Wednesday, Thursday,", "Friday")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(run_dir):
    """The server; after its last test it must be gone without a trace."""
    with arms_judge.server_of(ARM, run_dir, Limits(idle_s=300)) as started:
        yield started
        family = started._started.family()
    assert started.ending.clean, started.ending
    assert not any(process.alive() for process in family)


def test_it_went_through_the_states_in_order(server):
    states = [state for state, _ in server.outcome.timeline]
    assert states == [State.IMPORTING, State.LOADING, State.WARMING, State.READY]


def test_every_process_of_it_carries_the_marker(server):
    """SGLang renames its processes, which must not wipe the environment that names them as ours."""
    family = server._started.family()
    assert len(family) >= 3
    for process in family:
        assert f"NVFP4LAB_SERVER={server._started.marker}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()


def test_it_answers_and_scores(server):
    assert arms_scores.canary(server.url, *DAYS, tokens=4).kind is None
    rows = arms_scores.score(server.url, "Water boils at one hundred degrees.")
    assert len(rows) >= 5 and all(len(row) == arms_scores.TOP for row in rows)
    assert arms_scores.kl_by_token(rows, rows) == [0.0] * len(rows)


def test_route_log_and_trace_agree_on_the_kernel(server, run_dir):
    (agreed,) = which_kernel_witness.testify(server, ARM, run_dir)
    assert agreed.ok, agreed.why
    assert agreed.trace == (agreed.log,) == (agreed.route,)


def test_it_is_still_there(server):
    assert server.lost() is None
