"""A server that starts in 30 ms and misbehaves on demand: `launch_fake_server.py PORT MODE [TAG]`. Standard library only.

TAG stands on every command line, so that a test finds its own processes.
"""

import os
import signal
import socket
import sys
import time


def serve(port: int, status: str = "200 OK", requests: int | None = None) -> socket.socket:
    """Answer requests on `port` with `status`, for a minute or so many of them; the socket, still open."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    until, answered = time.monotonic() + 60, 0
    while answered != requests and (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        connection = listener.accept()[0]
        connection.recv(65536)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok".encode())
        connection.close()
        answered += 1
    return listener


def escape() -> bool:
    """Fork twice with a new session between, as a daemon does; True in the process that got away."""
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True


def scrubbed(port: int) -> None:
    """Become a process without any environment (no marker) that still serves and ignores TERM."""
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, str(port), "ignores_term", *sys.argv[3:]], {})


def main(port: int, mode: str) -> None:
    print("Load weight begin", flush=True)
    if mode == "dies_at_start":
        sys.exit("ValueError: this backend needs SM100+")
    if mode == "killed_at_start":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "hangs":
        time.sleep(60)
    if mode == "spins":
        while True:
            pass
    if mode == "never_healthy":
        serve(port, status="503 Service Unavailable")
    if mode == "dies_late":
        serve(port, requests=1)
        os._exit(7)
    if mode == "closes_port":
        serve(port, requests=1).close()
        time.sleep(60)
    if mode in ("ignores_term", "escapes_and_ignores_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode.startswith("escapes") and escape():
        time.sleep(60)
    if mode == "forks_away":
        if escape():
            time.sleep(0.5)  # so that the exit of the first process is surely seen before this one answers
            serve(port)
        sys.exit(0)
    if mode == "forks_away_scrubbed":
        if escape():
            time.sleep(0.5)
            scrubbed(port)
        sys.exit(0)
    if mode == "escape_serves":
        if escape():
            scrubbed(port)
        time.sleep(60)
    serve(port)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
