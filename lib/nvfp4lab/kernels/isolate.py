"""Each case in its own process: whatever a kernel does to its process, the next case does not feel it.

`Isolator.run(function, *args)` forks a worker from a server that has torch loaded and CUDA untouched, watches it and
returns an `Outcome`. OK means: the call returned a value of the promised type, the CUDA context it left behind still
computes, and the process ended by itself with exit code 0. Anything else has a verdict, a reason and the last output.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nvfp4lab
from nvfp4lab.errors import LabError
from nvfp4lab.kernels import isolate_device, isolate_outcome, isolate_proc, isolate_wire
from nvfp4lab.kernels.isolate_outcome import Limits, Outcome, Running
from nvfp4lab.records import Verdict

TICK_S = 0.05
START_TIMEOUT_S = 180  # importing torch from a cold network disk
# torch.cuda.is_available() then asks NVML, which unlike the CUDA runtime leaves a process fit for forking.
ASKS_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
KILL_TIMEOUT_S = 30  # a process stuck inside the driver may not die at once, or at all
PROBE_PAUSES_S = (0.0, 1.0, 5.0)  # a GPU that is being reset after an Xid comes back within seconds


class Isolator:
    """Runs calls one at a time, each in a worker of its own. A context manager; for one thread at a time.

    log_dir: output of cases goes here. preload: modules every worker has imported; none may initialise CUDA.
    wishes: modules that workers have imported too where that works and leaves CUDA untouched; `unfulfilled` says where
    it does not and why. They save each case its imports.
    env: added to the workers' environment. device_probe: run in a fresh worker after a case that did not end well, to see
    whether the GPU survived it; the default asks the GPU if there is one. None: no probe.
    """

    def __init__(
        self,
        log_dir: Path,
        preload: Sequence[str] = ("torch",),
        wishes: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        device_probe: Callable[[], Any] | None = isolate_device.probe_device,
    ):
        self.log_dir = log_dir
        self.lost_device = ""  # why no further case can run
        self.unfulfilled: dict[str, str] = {}
        self._preload, self._wishes = list(preload), list(wishes)
        self._env = dict(env or {})
        self._xids = isolate_device.XidWatch()
        if device_probe is isolate_device.probe_device and not isolate_device.has_gpu():
            device_probe = None
        self._device_probe = device_probe
        self._server: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> "Isolator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and whatever still runs under it."""
        self._drop_server()
        self._xids.close()

    def interrupt(self) -> None:
        """End the case in flight, if there is one; the only method that another thread may call."""
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):  # it is closing by itself
                control.send(b"kill")

    def run(
        self, function: Callable[..., Any], *args: Any, name: str = "case", limits: Limits | None = None, expect: type = object
    ) -> Outcome:
        """Call `function(*args)` in a fresh worker. `expect`: type that its value must have.

        Never raises for what the case does. Raises LabError if the call cannot be sent or the server cannot start.
        """
        call = _pickled(function, args)
        if self.lost_device:
            return Outcome(Verdict.NOT_RUN, f"the device did not recover from an earlier case: {self.lost_device}", device_ok=False)
        self._xids.drain()
        outcome = self._run(call, name, limits or Limits(), expect)
        if outcome.verdict is Verdict.OK or self._device_probe is None:
            return outcome
        device_ok = self._probe_device()
        return dataclasses.replace(outcome, xids=self._xids.drain(), device_ok=device_ok)

    def _probe_device(self) -> bool:
        for pause_s in PROBE_PAUSES_S:
            time.sleep(pause_s)
            found = self._run(_pickled(self._device_probe, ()), "device_probe", Limits(timeout_s=60), object)
            if found.verdict is Verdict.OK:
                return True
        self.lost_device = found.reason
        return False

    def _run(self, call: bytes, name: str, limits: Limits, expect: type) -> Outcome:
        self._start_server()
        output_path = self.log_dir / f"{name}.log"
        ours, theirs = socket.socketpair()
        running = None
        with ours:
            try:
                running = self._launch(theirs, ours, call, output_path)
                self._watch(running, ours, limits)
            finally:
                if running is None or running.ended is None:
                    self._drop_server()  # Ctrl-C, a dead server or an unkillable worker: the next case gets a fresh server
        return isolate_outcome.judge(running, expect)

    def _launch(self, theirs: socket.socket, ours: socket.socket, call: bytes, output_path: Path) -> Running:
        token = os.urandom(isolate_wire.TOKEN_BYTES)
        now = time.monotonic()
        running = Running(None, isolate_wire.Frames(token), output_path, isolate_proc.oom_kills(), now, now)
        try:
            with theirs, output_path.open("wb") as output:
                socket.send_fds(self._control, [json.dumps({"token": token.hex()}).encode()], [theirs.fileno(), output.fileno()])
            running.pid = json.loads(self._control.recv(1 << 16))["pid"]
            ours.sendall(len(call).to_bytes(8, "big") + call)
        except (OSError, ValueError):  # whoever died is seen by the watch
            pass
        return running

    def _watch(self, running: Running, channel: socket.socket, limits: Limits) -> None:
        """Follow the case until the server says how it ended, the server dies, or the worker survives its killing."""
        sources = [self._control, channel]
        while running.ended is None and not running.server_died:
            ready = select.select(sources, [], [], TICK_S)[0]
            if channel in ready:
                data = _receive(channel)
                running.take(data)
                if not data:
                    sources.remove(channel)
            if self._control in ready:
                message = _receive(self._control)
                running.ended = json.loads(message) if message else None
                running.server_died = not message
            elif not ready:
                running.tick()
            if not self._enforce(running, limits):
                return
        while channel in sources and (data := _receive(channel, wait=False)):
            running.take(data)

    def _enforce(self, running: Running, limits: Limits) -> bool:
        """Kill what is over a limit; False when the killed worker will not die."""
        if running.ended or running.server_died:
            return True
        if running.kill_sent_at:
            return time.monotonic() - running.kill_sent_at < KILL_TIMEOUT_S
        running.killed_for = running.over(limits)
        if running.killed_for:
            running.kill_sent_at = time.monotonic()
            self._control.send(b"kill")
        return True

    def _start_server(self) -> None:
        if self._server is not None and self._server.poll() is None:
            return
        self._drop_server()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        roots = [str(Path(nvfp4lab.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        command = "import sys; from nvfp4lab.kernels.isolate_server import main; main(int(sys.argv[1]))"
        with theirs, (self.log_dir / "fork_server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the lab alone
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, roots))} | ASKS_NVML | self._env,
            )
        self._control.send(json.dumps({"preload": self._preload, "wishes": self._wishes, "path": sys.path}).encode())
        self._control.settimeout(START_TIMEOUT_S)
        try:
            answer = json.loads(_receive(self._control) or b'{"error": "it ended at once"}')
        except TimeoutError:
            answer = {"error": f"no answer within {START_TIMEOUT_S} s"}
        self._control.settimeout(None)
        if "spoilt_by" in answer:
            self._wishes.remove(answer["spoilt_by"])
            self.unfulfilled[answer["spoilt_by"]] = answer["why"]
            self._drop_server()
            self._start_server()
        elif "ready" in answer:
            self.unfulfilled |= answer["missing"]
        else:
            self._drop_server()
            raise LabError(f"the fork server did not start: {answer['error']}; see {self.log_dir / 'fork_server.log'}", exit_code=3)

    def _drop_server(self) -> None:
        if self._control is not None:
            self._control.close()  # the server then kills its worker and leaves
        if self._server is not None:
            try:
                self._server.wait(timeout=KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
        self._server = self._control = None


def _pickled(function: Callable[..., Any], args: tuple) -> bytes:
    if getattr(function, "__module__", None) == "__main__" or "<" in getattr(function, "__qualname__", ""):
        raise LabError(f"{function!r} cannot run in isolation: a worker imports it by name, so put it at the top level of a module")
    try:
        return pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs the arguments' own code
        raise LabError(f"the call of {function!r} cannot be sent to a worker: {error}") from error


def _receive(sock: socket.socket, wait: bool = True) -> bytes:
    """What is there to read; b"" at the end of the stream (or, without waiting, when nothing is there)."""
    try:
        return sock.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
    except (ConnectionError, BlockingIOError):
        return b""
