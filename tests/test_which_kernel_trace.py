"""The trace is taken in the middle of an answer, however long the profiler takes to start."""

import gzip
import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from nvfp4lab.server import which_kernel, which_kernel_witness


class Profiled(http.server.BaseHTTPRequestHandler):
    """Streams a token every 5 ms; `start_profile` takes half a second, and the trace needs a token after that."""

    protocol_version = "HTTP/1.0"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if self.path in self.server.answers else 500)
        self.end_headers()
        if self.path == "/start_profile":
            self.server.asked = body
            time.sleep(0.5)
            self.server.profiling.set()
        elif self.path == "/generate":
            self._stream(min(body["sampling_params"]["max_new_tokens"], self.server.longest))

    def _stream(self, tokens: int) -> None:
        self.server.streams += 1
        for _ in range(tokens):
            try:
                self.wfile.write(b"data: {}\n\n")
            except OSError:
                self.server.dropped.set()
                return
            if self.server.profiling.is_set():
                self.server.profiling.clear()
                folder = Path(self.server.asked["output_dir"])
                content = {"traceEvents": [{"cat": "kernel", "name": "marlin::Marlin<1>"}]}
                (folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
            time.sleep(0.005)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Profiled)
    made.answers, made.longest, made.streams = {"/generate", "/start_profile"}, 10_000, 0
    made.profiling, made.dropped = threading.Event(), threading.Event()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def trace_of(server, folder: Path) -> Path | None:
    return which_kernel_witness.decode_trace(f"http://127.0.0.1:{server.server_port}", folder, on_gpu=True)


def test_the_answer_goes_on_until_the_trace_is_there_and_is_then_dropped(server, tmp_path):
    trace = trace_of(server, tmp_path / "arm")
    assert which_kernel.kernel_names(trace) == {"marlin::Marlin<1>": 1}
    assert server.asked["activities"] == ["CPU", "GPU"] and server.asked["num_steps"] == 1
    assert server.dropped.wait(5), "the server is still writing"
    assert server.streams == 1


def test_short_answers_are_asked_again_until_the_trace_is_there(server, tmp_path):
    server.longest = 20  # 0.1 s, over long before the profiler has started
    assert trace_of(server, tmp_path / "arm") is not None
    assert server.streams > 2


def test_a_trace_of_an_earlier_run_is_not_taken_for_ours(server, tmp_path):
    old = tmp_path / "arm" / "0-TP-0.trace.json.gz"
    old.parent.mkdir()
    old.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"cat": "kernel", "name": "old"}]}).encode()))
    assert trace_of(server, tmp_path / "arm").name == "1-TP-0.trace.json.gz"


def test_a_server_that_cannot_profile_gives_none(server, tmp_path):
    server.answers = {"/generate"}
    assert trace_of(server, tmp_path / "arm") is None
