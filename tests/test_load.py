"""Load is driven by a benchmark in its own process; what it says of each request is kept; wrong rows are void."""

import concurrent.futures
import html
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests

from nvfp4lab import params
from nvfp4lab.errors import LabError
from nvfp4lab.records import Stack, Verdict, WrongKind
from nvfp4lab.server import load, load_driver, load_run, load_tables, load_telemetry, plots_load
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.load import Client, LoadRun, Request
from nvfp4lab.server.load_canary import CanaryWatch, PatternCanary
from nvfp4lab.server.load_evidence import Cell, Table, Void
from nvfp4lab.server.load_store import Store
from nvfp4lab.server.load_telemetry import Reading
from nvfp4lab.server.params import LoadShape, Slo
from nvfp4lab.server.quality_canary import Canary, CanaryPrompt, Fault

SHAPE = LoadShape(input_tokens=5, output_tokens=9)
SICK = Fault(WrongKind.GARBAGE, "sick")


@pytest.fixture
def fake_benchmark(monkeypatch, tmp_path):
    """A driver that finds `load_fake_benchmark` under the name of SGLang's."""
    package = tmp_path / "site" / "sglang" / "benchmark"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "serving.py").write_text(Path(__file__).with_name("load_fake_benchmark.py").read_text())
    return os.environ | {"PYTHONPATH": str(tmp_path / "site")}


def test_runs_are_parsed_request_by_request(tmp_path, fake_benchmark):
    with Client(tmp_path, fake_benchmark) as client:
        first = client.run("http://x", "m", SHAPE, concurrency=2, requests=4, seed=1)
        second = client.run("http://x", "m", SHAPE, concurrency=2, requests=6, seed=2)
    assert first.requests == (Request(0.25, 1.25, 9),) * 4
    assert first.output_tok_s == 4 * 9 / 2.0 and second.request_s == 3.0
    assert first.requests[0].tpot_s == 0.125
    assert len(second.itl_s) == 6 * 8
    assert "benchmark prints to its log 2" in client.log.read_text()


def test_a_benchmark_that_breaks_is_an_error_with_its_log_and_the_next_run_works(tmp_path, fake_benchmark):
    with Client(tmp_path, fake_benchmark) as client:
        with pytest.raises(LabError, match=r"exit code 1; its log: .*load_client\.log"):
            client.run("http://x", "m", SHAPE, 1, 1, seed=100)
        assert client.run("http://x", "m", SHAPE, 1, 1, seed=1).requests
    assert "benchmark broke" in client.log.read_text()


def test_a_benchmark_that_dies_is_an_error(tmp_path, fake_benchmark):
    with Client(tmp_path, fake_benchmark) as client:
        with pytest.raises(LabError, match="died with exit code 9"):
            client.run("http://x", "m", SHAPE, 1, 1, seed=101)
        assert client.run("http://x", "m", SHAPE, 1, 1, seed=1).requests, "the next run gets a fresh process"


def test_a_benchmark_without_end_is_ended(tmp_path, fake_benchmark):
    with Client(tmp_path, fake_benchmark, limit_s=0.5) as client:
        client.run("http://x", "m", SHAPE, 1, 1, seed=1)
        stuck = client._process
        with pytest.raises(LabError, match="did not finish within 0 s"):
            client.run("http://x", "m", SHAPE, 1, 1, seed=102)
        assert stuck.poll() is not None
        assert client.run("http://x", "m", SHAPE, 1, 1, seed=1).requests


def test_the_older_module_name_is_found(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "bench_serving.py").touch()
    code = f"import runpy; print(runpy.run_path({load_driver.__file__!r})['module_name']())"
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout == "sglang.bench_serving\n", done.stderr


def test_the_stub_streams_every_token_to_many_at_once():
    def ask(url: str, tokens: int) -> list:
        body = {"text": "x", "sampling_params": {"max_new_tokens": tokens}, "stream": True}
        lines = requests.post(f"{url}/generate", json=body, stream=True, timeout=10).iter_lines()
        return [line.decode().removeprefix("data: ") for line in lines if line]

    with load.stub_server() as url:
        assert requests.get(f"{url}/v1/models", timeout=5).json()["data"][0]["id"] == "stub"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(ask, [url] * 8, range(1, 9)))
    for tokens, lines in enumerate(replies, start=1):
        assert lines[-1] == "[DONE]"
        assert [json.loads(line)["meta_info"]["completion_tokens"] for line in lines[:-1]] == list(range(1, tokens + 1))
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=1)


LEVELS = [
    ({}, True),
    ({"ttft_ms": 250.0}, True),
    ({"ttft_ms": 249.0}, False),
    ({"tpot_ms": 124.0}, False),
    ({"e2e_ms": 1250.0}, True),
    ({"e2e_ms": 1249.0}, False),
    ({"ttft_ms": 250.0, "e2e_ms": 1249.0}, False),
]


@pytest.mark.parametrize(("slo", "good"), LEVELS)
def test_goodput_asks_every_level_that_is_set(slo, good):
    request = Request(0.25, 1.25, 9)
    assert request.meets(Slo(**slo)) is good
    assert not Request(0.25, 1.25, 9, error="x").meets(Slo(**slo))


def loaded(tokens=9, errors=0, requests=4, duration_s=2.0) -> LoadRun:
    made = tuple(Request(0.25, 1.25, tokens, "ClientError\nconnection lost" if n < errors else "") for n in range(requests))
    return LoadRun(SHAPE, 2, duration_s, made, (0.125,))


def test_the_gravest_reason_voids_a_run():
    why = load_run._why_void
    assert why(None, None, loaded()) is None
    assert why(Fault(None, "no answer, timed out"), "client", None).verdict is Verdict.HANG
    assert why(Fault(WrongKind.NAN, "'x': got '!!!!'"), "client", None) == Void(
        Verdict.WRONG, "canary under load: 'x': got '!!!!'", WrongKind.NAN
    )
    assert why(None, "benchmark failed", None).verdict is Verdict.NOT_RUN
    unanswered = why(None, None, loaded(errors=1))
    assert unanswered.verdict is Verdict.CRASH and unanswered.reason == "1 of 4 requests failed, the first with: connection lost"
    assert why(None, None, loaded(tokens=8)).kind is WrongKind.GARBAGE


def test_a_silent_server_is_told_from_a_wrong_one(monkeypatch):
    def silent(*args, **kwargs):
        raise requests.ReadTimeout("timed out")

    monkeypatch.setattr(requests, "post", silent)
    for checks in (PatternCanary(4), Canary((CanaryPrompt("x", (1,), (2,)),))):
        with CanaryWatch(checks, "http://x") as watch:
            pass
        assert watch.fault.kind is None and watch.fault.what.endswith("no answer, timed out")


class Scripted:
    """A canary that fails at its n-th check."""

    def __init__(self, fails_at: int | None):
        self.fails_at, self.seen, self.asked = fails_at, 0, threading.Event()

    def check(self, base_url: str) -> Fault | None:
        self.seen += 1
        self.asked.set()
        return SICK if self.seen == self.fails_at else None


def test_the_canary_is_asked_until_the_load_ends_and_at_least_once():
    watch = CanaryWatch(Scripted(None), "http://x")
    watch._over.set()  # as if the load had ended before the thread got its turn
    with watch:
        pass
    assert (watch.asked, watch.fault) == (1, None)
    sick = Scripted(3)
    with CanaryWatch(sick, "http://x") as watch:
        while sick.seen < 3:
            sick.asked.wait(1)
    assert (watch.asked, watch.fault) == (3, SICK)


def cell(name="a", concurrency=2, ceiling=1e4, **fields) -> Cell:
    return Cell(Arm(name=name, model="m"), SHAPE, concurrency, ceiling, **fields)


def test_a_sound_cell_becomes_numbers_with_units_and_intervals():
    record = cell(runs={0: loaded(), 1: loaded()}).evidence(Slo(ttft_ms=250.0), None)
    assert record.verdict is Verdict.OK and record.stage == "load" and record.subject == "arm:a"
    speed = record.number("output_tok_s")
    assert (speed.value, speed.unit, speed.n) == (18.0, "tok/s", 2)
    assert record.number("goodput_s").value == 2.0
    assert record.number("ttft_p50").value == 250.0
    assert record.details["concurrency"] == 2


def test_one_void_round_voids_the_cell_and_its_numbers():
    half_void = cell(runs={0: loaded()}, voids={1: Void(Verdict.WRONG, "canary", WrongKind.GARBAGE)})
    assert not half_void.sound and cell(runs={0: loaded()}).sound and not cell().sound
    record = half_void.evidence(Slo(), None)
    assert (record.verdict, record.kind, record.numbers) == (Verdict.WRONG, WrongKind.GARBAGE, ())


@pytest.mark.parametrize(("ceiling", "flagged"), [(18.0 / 0.79, False), (18.0 / 0.81, True)])
def test_a_row_near_the_clients_ceiling_is_flagged(ceiling, flagged):
    record = cell(ceiling=ceiling, runs={0: loaded()}).evidence(Slo(), None)
    assert record.details["near_client_ceiling"] is flagged
    assert ("client's own ceiling" in record.reason) is flagged


def test_table_compares_with_the_first_arm_and_draws_void_rows():
    p = params.check({}, "test")
    good, void = cell("a", runs={0: loaded()}), cell("b", voids={0: Void(Verdict.CRASH, "gone")})
    fast = cell("c", runs={0: loaded(duration_s=1.0)})
    table = Table(p, [good, void, fast], [])
    assert table.compared(good) is None and table.compared(void) is None
    assert table.compared(fast).ratio.value == pytest.approx(2.0)
    assert [record.verdict for record in table.evidence()] == [Verdict.OK, Verdict.CRASH, Verdict.OK]
    told = text_of(load_tables.comparisons(table))
    assert "| b | 5 | 9 | 2 | not_run | | | | one of the two rows is void |" in told
    assert "| c | 5 | 9 | 2 | no difference | 2.000 | unknown | 1 | cannot be told: one start |" in told
    numbers = text_of(load_tables.rows(table))
    assert "| gone |" in numbers and "| ok | 18 [18, 18] | 2 |" in numbers
    figure = plots_load.curves(table)
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses) == 1, "a void row must be visible in the picture"


def text_of(html: str) -> str:
    """Cells between bars."""
    return (
        re.sub(r"(<[^>]*>|\s)+", " ", re.sub(r"</?t[dh]\b[^>]*>", "|", html))
        .replace("||", "|")
        .replace("|", " | ")
        .replace("  ", " ")
    )


def test_no_table_cuts_a_sentence():
    """pandas would show the first fifty letters."""
    p = params.check({}, "test")
    near = cell("a", ceiling=19.0, runs={0: loaded()})
    assert "within 20% of the client's own ceiling: the client may be what is measured" in html.unescape(
        load_tables.rows(Table(p, [near], []))
    )


def test_a_service_level_far_above_all_that_was_measured_is_not_drawn():
    """It would press the curves onto the axis: at 125 ms per token, 500 ms would leave them a quarter of the height."""
    for level_ms, drawn in ((300.0, True), (500.0, False)):
        p = params.check({"slo": {"tpot_ms": level_ms}}, "test")
        latency = plots_load.curves(Table(p, [cell("a", runs={0: loaded()})], [])).axes[1]
        assert any(line.get_linestyle() == ":" for line in latency.lines) is drawn
        assert (latency.get_ylim()[1] > 250.0) == drawn


@pytest.mark.parametrize(("tokens", "concurrency", "wanted"), [(64, 1, 256), (64, 128, 1024), (8, 1, 1024), (8192, 4, 32)])
def test_the_ceiling_is_taken_of_a_run_long_enough(tokens, concurrency, wanted):
    assert load_run.ceiling_requests(LoadShape(input_tokens=8, output_tokens=tokens), concurrency) == wanted


def test_each_arm_comes_first_equally_often():
    arms = [Arm(name=name, model="m") for name in "abc"]
    orders = [[arm.name for arm in load_run.rotated(arms, number)] for number in range(3)]
    assert sorted(order[0] for order in orders) == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_telemetry_becomes_numbers_with_range():
    made = load_telemetry.numbers([Reading(300.0, 1500, 60, False), Reading(500.0, 1300, 70, True)])
    power = made[0]
    assert (power.name, power.value, power.unit, power.low, power.high, power.n) == ("power", 400.0, "W", 300.0, 500.0, 2)
    assert made[-1].value == 0.5
    assert load_telemetry.numbers([]) == ()


class FakeNvml:
    """Two GPUs; the second is held back by its power limit."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwSlowdown = 4, 8
    nvmlClocksThrottleReasonSwThermalSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 32, 64
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 300_000 + 100_000 * handle)
    nvmlDeviceGetClockInfo = staticmethod(lambda handle, kind: 1500)
    nvmlDeviceGetTemperature = staticmethod(lambda handle, kind: 60)
    nvmlDeviceGetCurrentClocksThrottleReasons = staticmethod(lambda handle: 4 * handle)


def test_telemetry_samples_all_gpus_while_its_block_runs(monkeypatch):
    monkeypatch.setattr(load_telemetry.processes_gpu, "nvml", FakeNvml)
    monkeypatch.setattr(load_telemetry, "PERIOD_S", 0.01)
    with load_telemetry.Telemetry() as telemetry:
        while len(telemetry.readings) < 4:
            threading.Event().wait(0.01)
    assert telemetry.readings[:2] == [Reading(300.0, 1500, 60, False), Reading(400.0, 1500, 60, True)]
    count = len(telemetry.readings)
    threading.Event().wait(0.05)
    assert len(telemetry.readings) == count, "it went on after its block"


def test_telemetry_is_of_the_servers_own_gpus(monkeypatch):
    monkeypatch.setattr(load_telemetry.processes_gpu, "nvml", FakeNvml)
    monkeypatch.setattr(load_telemetry, "PERIOD_S", 0.01)
    for env, count, power_w in (
        ({}, 1, 300.0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, 400.0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None, 400.0),
    ):
        with load_telemetry.Telemetry(env, count) as telemetry:
            while len(telemetry.readings) < 2:
                threading.Event().wait(0.01)
        assert {reading.power_w for reading in telemetry.readings} == {power_w}


def test_a_finished_run_is_not_repeated_and_one_that_was_not_run_is(tmp_path):
    p = params.check({"run_dir": str(tmp_path)}, "test")
    store = Store(p, Stack(sglang="1"))
    reading = Reading(300.0, 1500, 60, False)
    kept = cell(runs={0: loaded()}, voids={1: Void(Verdict.NOT_RUN, "no trace"), 2: Void(Verdict.WRONG, "x", WrongKind.NAN)})
    kept.readings.append(reading)
    kept.canary_checks = 3
    for number in range(3):
        store.keep(kept, number)
    fresh = cell()
    assert [store.recall(fresh, number) for number in range(4)] == [True, False, True, False]
    assert fresh.runs == kept.runs and fresh.voids == {2: kept.voids[2]}
    assert (fresh.readings, fresh.canary_checks) == ([reading], 3)
    assert not store.recall(cell(concurrency=8), 0), "another cell"
    assert not Store(p, Stack(sglang="2")).recall(cell(), 0), "another stack"
