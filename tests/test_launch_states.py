"""What a start is doing is read from its log; what counts as progress decides when it is hung."""

import socket

import pytest

from nvfp4lab.server import launch
from nvfp4lab.server.states import LogWatch, ProgressClock, Sample, State


def sample(time_s, log_lines=0, cpu_s=0.0, gpu_mib=0.0, compiling=False):
    return Sample(time_s, log_lines, cpu_s, gpu_mib, compiling)


def after(*samples):
    clock = ProgressClock(samples[0])
    for each in samples[1:]:
        clock.tick(each)
    return clock


@pytest.mark.parametrize(
    ("later", "idle_s", "spinning_s"),
    [
        (sample(100.0), 100, 100),
        (sample(100.0, log_lines=1), 0, 0),
        (sample(100.0, gpu_mib=64.0), 0, 0),
        (sample(100.0, cpu_s=100.0), 0, 100),  # a spin is weaker than progress
        (sample(100.0, cpu_s=5.0), 100, 100),  # pollers of a dead server use some CPU too
        (sample(100.0, cpu_s=100.0, compiling=True), 0, 0),
        (sample(100.0, compiling=True), 100, 100),  # a compiler that does nothing is no progress
        (sample(100.0, cpu_s=-50.0), 100, 100),  # a process that left takes its CPU time out of the sum
    ],
)
def test_progress(later, idle_s, spinning_s):
    clock = after(sample(0.0), later)
    assert (clock.idle_s, clock.spinning_s) == (idle_s, spinning_s)


def test_progress_resets_the_clock_and_silence_counts_from_there():
    clock = after(sample(0.0), sample(50.0), sample(60.0, log_lines=1), sample(90.0, log_lines=1))
    assert clock.idle_s == 30.0


PHASES = [
    ("Load weight begin. avail mem=19.33 GB", State.LOADING),
    ("[2026-01-01] Init torch distributed begin.", State.LOADING),
    ("Capture cuda graph begin. This can take up to several minutes.", State.CAPTURING),
    ("Capture decode CUDA graph begin. bs=[1, 2]", State.CAPTURING),
    ("INFO:     Uvicorn running on http://127.0.0.1:31999 (Press CTRL+C to quit)", State.WARMING),
]


@pytest.mark.parametrize(("line", "state"), PHASES)
def test_the_log_tells_the_phase(tmp_path, line, state):
    log = tmp_path / "log"
    log.write_text(f"import noise\n{line}\n")
    watch = LogWatch(log)
    assert watch.phase is State.IMPORTING
    watch.read()
    assert watch.phase is state


def test_answers_to_our_own_polling_are_no_progress(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\n")
    watch = LogWatch(log)
    watch.read()
    with log.open("a") as stream:
        stream.write('INFO:     127.0.0.1:57010 - "GET /health HTTP/1.1" 503 Service Unavailable\n' * 50)
    watch.read()
    assert watch.lines == 1
    with log.open("a") as stream:
        stream.write('INFO:     127.0.0.1:57010 - "POST /generate HTTP/1.1" 200 OK\n')
    watch.read()
    assert watch.lines == 2


def test_a_line_written_in_two_pieces_is_read_whole_and_a_progress_bar_counts(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"Load wei")
    watch = LogWatch(log)
    watch.read()
    assert (watch.lines, watch.phase) == (0, State.IMPORTING)
    with log.open("ab") as stream:
        stream.write(b"ght begin\n" + "Loading shards:  50%|█\rLoading shards: 100%|██\r".encode())
    watch.read()
    assert (watch.lines, watch.phase) == (3, State.LOADING)


def test_ports_are_below_the_ephemeral_range_free_and_handed_out_once():
    """A server listens a minute after its port was chosen; until then the kernel gives ephemeral ports to anybody."""
    ports = [launch.fresh_port() for _ in range(200)]
    lowest_ephemeral = int(launch.EPHEMERAL_PORTS.read_text().split()[0])
    assert len(set(ports)) == 200
    assert all(launch.FIRST_PORT <= port < max(lowest_ephemeral, launch.FIRST_PORT + 10_000) for port in ports)


def test_a_port_that_is_taken_is_not_handed_out(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port, free, other = taken.getsockname()[1], launch.fresh_port(), launch.fresh_port()
        monkeypatch.setattr(launch, "_HANDED_OUT", {free})
        monkeypatch.setattr(launch.random.SystemRandom, "sample", lambda *_: [port, free, other])
        assert launch.fresh_port() == other, "the first is taken, the second was handed out"
