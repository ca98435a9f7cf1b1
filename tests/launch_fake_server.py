"""A server that starts in 30 ms and misbehaves on demand: `launch_fake_server.py PORT MODE [FOLDER [GPU]]`. Standard library only.

FOLDER stands on every command line, so that a test finds its own processes, and gets a file `seen` with the ports and the
GPU memory that were really taken. GPU is `INDEX:MIB:LIBRARY`: every process of the server holds that much memory of that GPU,
through the driver library at that path, or through torch where LIBRARY is `torch`.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

SYS_EXIT = {"x86_64": 60, "aarch64": 93}  # exit(2): of one thread
LIFE_S = 120  # a server that a test forgets goes by itself
_HELD = []  # GPU memory, as long as the process lives


def note(words: str) -> None:
    """One line in FOLDER/seen."""
    if len(sys.argv) > 3 and os.path.isdir(sys.argv[3]):  # noqa: PTH112 (importing pathlib would double the start-up time)
        with open(os.path.join(sys.argv[3], "seen"), "a") as seen:  # noqa: PTH118, PTH123
            seen.write(words + "\n")


def hold_gpu() -> None:
    """Take the GPU memory that was asked for. A process that has done so must not fork: CUDA does not survive it."""
    if len(sys.argv) < 5 or not sys.argv[4]:
        return
    index, mib, library = sys.argv[4].split(":")
    os.environ["CUDA_VISIBLE_DEVICES"] = index
    take = _through_torch if library == "torch" else _through_driver
    take(int(mib) << 20, library)
    note(f"gpu {mib}")


def _through_torch(size_bytes: int, library: str) -> None:
    import torch

    _HELD.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))


def _through_driver(size_bytes: int, library: str) -> None:
    cuda, device, context, memory = ctypes.CDLL(library), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size_bytes)),
    ):
        if code:
            raise SystemExit(f"the CUDA driver said {code}")


def listen(port: int) -> socket.socket:
    listener = bound(port)
    listener.listen()
    return listener


def bound(port: int) -> socket.socket:
    """Holds the port and refuses connections until it listens."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    note(f"port {held.getsockname()[1]}")
    return held


def answer(listener: socket.socket, status: str = "200 OK", requests: int | None = None) -> None:
    """Answer requests with `status`, as long as a fake server lives or so many of them."""
    until, answered = time.monotonic() + LIFE_S, 0
    while answered != requests and (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        connection = listener.accept()[0]
        connection.recv(65536)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok".encode())
        connection.close()
        answered += 1


def serve(port: int) -> None:
    hold_gpu()
    answer(listen(port))


def wait() -> None:
    hold_gpu()
    time.sleep(LIFE_S)


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def escape() -> bool:
    """Fork twice with a new session between, as a daemon does; True in the process that got away."""
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True


def child(mode: str, port: int = 0, bare: bool = False) -> int:
    """Pid of another process of this server, in a session of its own. bare: without an environment, so without the marker."""
    flags = [] if sys.argv[4:] and sys.argv[4].endswith(":torch") else ["-I", "-S"]
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, *flags, __file__, str(port), mode, *sys.argv[3:]]
    return os.posix_spawn(sys.executable, command, kept if bare else os.environ, setsid=True)


def until_answering(port: int) -> None:
    deadline = time.monotonic() + LIFE_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)


def dies(by: signal.Signals) -> Callable[[int], None]:
    """As a crash in a kernel, an abort of NCCL or the system's OOM killer ends a server."""

    def die(port: int) -> None:
        hold_gpu()
        os.kill(os.getpid(), by)
        time.sleep(LIFE_S)

    return die


def hangs(says: str = "") -> Callable[[int], None]:
    """Nothing more after the line that begins a phase."""

    def hang(port: int) -> None:
        print(says, flush=True)
        wait()

    return hang


def dies_at_start(port: int) -> None:
    hold_gpu()
    sys.exit("ValueError: this backend needs SM100+")


def out_of_memory(port: int) -> None:
    hold_gpu()
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8.00 GiB")


def spins(port: int) -> None:
    hold_gpu()
    while True:
        pass


def never_healthy(port: int) -> None:
    hold_gpu()
    answer(listen(port), status="503 Service Unavailable")


def never_answers(port: int) -> None:
    hold_gpu()
    with listen(port):
        time.sleep(LIFE_S)


def hangs_compiling(port: int) -> None:
    child("named_nvcc")
    wait()


def named_nvcc(port: int) -> None:
    with open("/proc/self/comm", "w") as name:  # noqa: PTH123
        name.write("nvcc")
    time.sleep(LIFE_S)


def dies_late(port: int) -> None:
    hold_gpu()
    answer(listen(port), requests=1)
    os._exit(7)


def dies_slowly(port: int) -> None:
    """As a process that ends while a GPU's driver is busy: no file is open any more, and it is not gone for a while."""
    hold_gpu()
    answer(listen(port), requests=1)
    os.closerange(0, 65536)
    time.sleep(3)
    os._exit(6)


def closes_port(port: int) -> None:
    hold_gpu()
    with listen(port) as listener:
        answer(listener, requests=1)
    time.sleep(LIFE_S)


def child_keeps_port(port: int) -> None:
    """The first process ends after one answer, and its child holds the socket."""
    listener = bound(port)
    if os.fork() == 0:
        deaf()
        wait()
    hold_gpu()
    listener.listen()  # not before: a request that came while the GPU starts up would be given up, and answered to nobody
    answer(listener, requests=1)
    os._exit(9)


def second_port(port: int) -> None:
    """As the rendezvous of torch.distributed in a worker."""
    child("other_port")
    serve(port)


def other_port(port: int) -> None:
    deaf()
    hold_gpu()
    with listen(0):
        time.sleep(LIFE_S)


def worker_dies(port: int) -> None:
    """One of four ranks crashes; the first process ends itself and leaves the others, as SGLang does by SIGQUIT."""
    ranks = [child("deaf_wait") for _ in range(3)] + [child("killed_at_start")]
    hold_gpu()
    os.waitpid(ranks[-1], 0)
    os.kill(os.getpid(), signal.SIGQUIT)
    time.sleep(LIFE_S)


def deaf_wait(port: int) -> None:
    deaf()
    wait()


def many_children(port: int) -> None:
    for _ in range(8):
        child("deaf_wait")
    serve(port)


def respawns(port: int) -> None:
    """A supervisor that does not hear TERM and starts its worker again, whoever ends it."""
    deaf()
    hold_gpu()
    while True:
        os.waitpid(child("healthy", port), 0)


def breeds(port: int) -> None:
    """At TERM it first starts another process, without the marker, that does not hear it."""

    def breed(*_) -> None:
        deaf()  # what it starts does not hear TERM either, from its first moment on
        child("deaf_wait", bare=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, breed)
    serve(port)


def breeds_and_lingers(port: int) -> None:
    """As `breeds`, but its end takes 3 s, as a process's does whose threads are inside a GPU's driver.

    Meanwhile its first thread is a zombie, and what it started still counts as its child.
    """

    import threading  # slow; no other mode needs it

    def breed(*_) -> None:
        deaf()
        child("deaf_wait", bare=True)
        threading.Thread(target=lambda: (time.sleep(3.0), os._exit(0))).start()
        ctypes.CDLL(None).syscall(SYS_EXIT[os.uname().machine], 0)  # of this thread alone

    signal.signal(signal.SIGTERM, breed)
    serve(port)


def halts(port: int) -> None:
    """Halted by a signal (a debugger, a batch system) once it is ready: TERM waits until it goes on."""
    hold_gpu()
    answer(listen(port), requests=1)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LIFE_S)


def ignores_term(port: int) -> None:
    deaf()
    serve(port)


def escapes(port: int) -> None:
    if escape():
        wait()
    serve(port)


def escapes_and_ignores_term(port: int) -> None:
    deaf()
    escapes(port)


def escape_serves(port: int) -> None:
    if escape():
        child("ignores_term", port, bare=True)
        os._exit(0)
    wait()


def forks_away(port: int) -> None:
    if not escape():
        sys.exit(0)
    time.sleep(0.5)  # so that the exit of the first process is surely seen before this one answers
    serve(port)


def forks_away_scrubbed(port: int) -> None:
    if not escape():
        sys.exit(0)
    time.sleep(0.5)
    child("ignores_term", port, bare=True)


MODES: dict[str, Callable[[int], None]] = {
    "healthy": serve,
    "killed_at_start": dies(signal.SIGSEGV),
    "aborts": dies(signal.SIGABRT),
    "killed_by_the_system": dies(signal.SIGKILL),
    "hangs": hangs(),
    "hangs_capturing": hangs("Capture cuda graph begin. This can take up to several minutes."),
    "hangs_warming": hangs("Application startup complete."),
    **{
        mode.__name__: mode
        for mode in (
            *(dies_at_start, out_of_memory, spins, never_healthy, never_answers, hangs_compiling, named_nvcc, dies_late),
            *(dies_slowly, closes_port, child_keeps_port, second_port, other_port, worker_dies, deaf_wait, many_children, respawns),
            *(
                breeds,
                breeds_and_lingers,
                halts,
                ignores_term,
                escapes,
                escapes_and_ignores_term,
                escape_serves,
                forks_away,
                forks_away_scrubbed,
            ),
        )
    },
    "hangs_importing": lambda port: wait(),
}

if __name__ == "__main__":
    asked = sys.argv[2]
    if asked != "hangs_importing":
        print("Load weight begin", flush=True)
    MODES.get(asked, serve)(int(sys.argv[1]))
