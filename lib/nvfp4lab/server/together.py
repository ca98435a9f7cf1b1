"""Several servers started side by side: a start is mostly imports, so a dozen are ready in the time of two.

    with up([first, second]) as failures:
        # whoever is not in `failures` answers

What they do afterwards (answer, be measured) is the caller's to order. All are ended when the block is left, whatever
happened in it, and only then is GPU memory compared with before: while a neighbour lives nobody can say whose it is.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from nvfp4lab.server import processes_gpu, processes_term
from nvfp4lab.server.launch import GPU_SLACK_MIB, Server, StartFailed, wait_until

T = TypeVar("T")


@contextlib.contextmanager
def up(servers: Sequence[Server]) -> Iterator[dict[str, StartFailed]]:
    """Start all, wait until each is ready or has failed; the failures by server name. One server is started as ever.

    Raises what a start raises beside StartFailed (OSError: no log can be written), after ending the others.
    """
    if not servers:
        yield {}
        return
    if len(servers) == 1:
        yield from _alone(servers[0])
        return
    before_mib = processes_gpu.used_mib()
    for server in servers:
        server.has_neighbours = True
        processes_term.add(server)  # here, since only the main thread may say what SIGTERM does
    starts = [_Start(server) for server in servers]
    try:
        for start in starts:
            start.thread.start()
        for start in starts:
            start.thread.join()
        if broken := [start.error for start in starts if start.error and not isinstance(start.error, StartFailed)]:
            raise broken[0]
        yield {start.server.name: start.error for start in starts if start.error}
    finally:
        _end([start for start in starts if start.thread.ident], before_mib)


def _alone(server: Server) -> Iterator[dict[str, StartFailed]]:
    try:
        server.start()
    except StartFailed as error:
        yield {server.name: error}
        return
    try:
        yield {}
    finally:
        server.stop()


class _Start:
    """One server's start in a thread; `error` is how it failed."""

    def __init__(self, server: Server):
        self.server, self.error = server, None
        self.thread = threading.Thread(target=self._run, name=f"start {server.name}", daemon=True)

    def _run(self) -> None:
        try:
            self.server.start()
        except Exception as error:
            self.error = error


def _end(starts: Sequence[_Start], before_mib: tuple[float, ...]) -> None:
    stops = [threading.Thread(target=start.server.stop, name=f"stop {start.server.name}") for start in starts]
    for thread in stops:
        thread.start()
    for thread in [*stops, *(start.thread for start in starts)]:
        thread.join()
    patience_s = max((start.server.limits.release_s for start in starts), default=0.0)
    wait_until(lambda: processes_gpu.above(before_mib) <= GPU_SLACK_MIB, patience_s)
    left_mib = processes_gpu.above(before_mib)
    for start in starts:
        start.server.ending = dataclasses.replace(start.server.stop(), left_gpu_mib=left_mib)
        processes_term.remove(start.server)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all calls, made in a thread each; a single one is made here.

    An error of one is raised when it is its turn, and Ctrl-C at once: whoever then leaves `up` takes the servers from the
    calls that still run.
    """
    if len(calls) <= 1:
        return [call() for call in calls]
    pool = concurrent.futures.ThreadPoolExecutor(len(calls))
    try:
        return [future.result() for future in [pool.submit(call) for call in calls]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def gpus_of(demands: Sequence[int]) -> list[dict[str, str]]:
    """For each server the environment variable that gives it as many of our GPUs as it demands, taken in turn.

    With fewer GPUs than all demand together they are shared. {}: it needs none, or is alone and takes the first ones.
    """
    names = itertools.cycle([name for name, _ in processes_gpu.visible()] or [""])
    if len(demands) == 1:
        return [{}]
    return [{processes_gpu.VISIBLE: ",".join(itertools.islice(names, demand))} if demand else {} for demand in demands]
