"""One progress display for everything that takes over two seconds: a bar with ETA on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
LOG_EVERY_S = 10.0  # steps that are short and many: a log gets a line at most this often


class Progress:
    """Counts `total` steps. Use as a context manager; call `step` after each."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None):
        self.total, self.label = total, label
        self.stream = stream or sys.stderr
        self.done, self.started = 0, time.monotonic()
        self.bar = tqdm(total=total, desc=label, file=self.stream, dynamic_ncols=True) if self.stream.isatty() else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, what: str) -> None:
        """One more step is done: `what` says which and how it ended."""
        self.done += 1
        if self.bar is not None:
            self.bar.write(what, file=self.stream)
            self.bar.update(1)
        else:
            print(f"[{self.done}/{self.total}] {what}, ETA {self.eta()}", file=self.stream, flush=True)

    def eta(self) -> str:
        """Time left if the rest goes as the steps so far did."""
        left_s = (time.monotonic() - self.started) / max(self.done, 1) * (self.total - self.done)
        return f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"


def passing(items: Sequence[Item], label: str, stream: TextIO | None = None, every_s: float = LOG_EVERY_S) -> Iterator[Item]:
    """The same items, shown as they pass, for steps too short to name: a bar on a terminal, a line every `every_s` in a log."""
    stream = stream or sys.stderr
    if stream.isatty():
        yield from tqdm(items, desc=label, file=stream, mininterval=1.0, leave=False)
        return
    started = said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= every_s:
            said, left_s = now, (now - started) / done * (len(items) - done)
            print(f"[{done}/{len(items)}] {label}, ETA {left_s:.0f} s", file=stream, flush=True)
