"""One progress display for everything that takes over two seconds: a bar with ETA on a terminal, plain lines in a log."""

import sys
import time
from typing import TextIO

from tqdm import tqdm


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
