"""Drives load by SGLang's own serving benchmark, and keeps what it says of every single request.

with Client(run_dir, env) as client:
    run = client.run(server.url, tokenizer, LoadShape(...), concurrency=8, requests=24, seed=1)
    run.output_tok_s
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nvfp4lab.errors import LabError
from nvfp4lab.server import load_driver, load_stub
from nvfp4lab.server.launch import past_proxies
from nvfp4lab.server.params import LoadShape, Slo

LEAVE_S = 2.0  # from the end of its input to the end of the process


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a run. ttft_s: to the first token; latency_s: to the last; error: empty when it was answered."""

    ttft_s: float
    latency_s: float
    output_tokens: int
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for a single token, as SGLang counts it."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def meets(self, slo: Slo) -> bool:
        """Whether it was answered within every service level that is set."""
        observed = ((self.ttft_s, slo.ttft_ms), (self.tpot_s, slo.tpot_ms), (self.latency_s, slo.e2e_ms))
        return not self.error and all(limit is None or seconds * 1000 <= limit for seconds, limit in observed)


@dataclasses.dataclass(frozen=True)
class LoadRun:
    """One run of the benchmark at one concurrency. itl_s: every gap between two tokens of one request."""

    shape: LoadShape
    concurrency: int
    duration_s: float
    requests: tuple[Request, ...]
    itl_s: tuple[float, ...]

    @property
    def output_tok_s(self) -> float:
        return sum(request.output_tokens for request in self.requests if not request.error) / self.duration_s

    @property
    def request_s(self) -> float:
        return sum(not request.error for request in self.requests) / self.duration_s

    def goodput_s(self, slo: Slo) -> float:
        """Requests per second that met `slo`."""
        return sum(request.meets(slo) for request in self.requests) / self.duration_s

    def unanswered(self) -> str | None:
        """What became of requests that got no answer; None when all did."""
        failed = [request.error for request in self.requests if request.error]
        if not failed:
            return None
        first = failed[0].strip().splitlines()[-1][:160]
        return f"{len(failed)} of {len(self.requests)} requests failed, the first with: {first}"

    def cut_short(self) -> str | None:
        """Answers shorter than asked though the end-of-text token is ignored; None when there are none."""
        short = sum(request.output_tokens < self.shape.output_tokens for request in self.requests)
        return f"{short} of {len(self.requests)} answers are shorter than asked" if short else None


class Client:
    """The benchmark in a process of its own, imported once, as a context manager.

    env: the whole environment, in which `import sglang` works. limit_s: of one run.
    """

    def __init__(self, run_dir: Path | str, env: Mapping[str, str], limit_s: float = 3600.0):
        self.limit_s = limit_s
        self.log = Path(run_dir) / "logs" / "load_client.log"
        self._env = {**env, **past_proxies(env)}

    def __enter__(self) -> "Client":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._start()
        return self

    def __exit__(self, *exception) -> None:
        self._end()

    def run(self, url: str, tokenizer: Path | str, shape: LoadShape, concurrency: int, requests: int, seed: int) -> LoadRun:
        """One run of `requests` requests with random token ids. Raises LabError when the benchmark fails or takes too long."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.jsonl"
            arguments = ["--backend", "sglang", "--base-url", url, "--model", str(tokenizer), "--tokenizer", str(tokenizer)]
            arguments += ["--dataset-name", "random-ids", "--random-range-ratio", "1", "--num-prompts", str(requests)]
            arguments += ["--random-input-len", str(shape.input_tokens), "--random-output-len", str(shape.output_tokens)]
            arguments += ["--max-concurrency", str(concurrency), "--warmup-requests", "1", "--seed", str(seed)]
            arguments += ["--output-file", str(output), "--output-details", "--disable-tqdm"]
            code = self._ask(arguments)
            if code != 0 or not output.exists():
                raise LabError(f"SGLang's benchmark failed with exit code {code}; its log: {self.log}")
            return parse(json.loads(output.read_text(encoding="utf-8").splitlines()[-1]), shape, concurrency)

    def _ask(self, arguments: list[str]) -> int:
        """The benchmark's exit code. After a death or a run without end the next run gets a fresh process."""
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        answered = bool(select.select([self._process.stdout], [], [], self.limit_s)[0])
        reply = self._process.stdout.readline() if answered else ""
        if reply:
            return json.loads(reply)["exit"]
        how = f"died with exit code {self._process.wait()}" if answered else f"did not finish within {self.limit_s:.0f} s"
        self._end()
        self._start()
        raise LabError(f"SGLang's benchmark {how}; its log: {self.log}")

    def _start(self) -> None:
        command = [sys.executable, load_driver.__file__, str(self.log)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=self._env, start_new_session=True, text=True)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the benchmark may have helpers
            self._process.wait()
        self._process.stdout.close()


def parse(result: Mapping, shape: LoadShape, concurrency: int) -> LoadRun:
    """A LoadRun from one result line of the benchmark, written with --output-details."""
    rows = zip(result["ttfts"], result["itls"], result["output_lens"], result["errors"], strict=True)
    requests = tuple(Request(ttft, ttft + sum(itls), tokens, error or "") for ttft, itls, tokens, error in rows)
    gaps = tuple(gap for itls in result["itls"] for gap in itls)
    return LoadRun(shape, concurrency, result["duration"], requests, gaps)


@contextlib.contextmanager
def stub_server():
    """The URL of a running stub server, which is gone afterwards."""
    process = subprocess.Popen([sys.executable, "-I", "-S", load_stub.__file__], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
