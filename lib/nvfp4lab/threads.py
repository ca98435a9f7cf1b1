"""How many threads torch's CPU kernels take."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def at_most(count: int) -> Iterator[None]:
    """At most `count` threads inside the block.

    torch takes every core. For small matrices that gains nothing alone, and where several do so at once it loses all: four
    calibrations of a 135M model side by side on 32 cores had not ended after five minutes, with six threads each they took ten
    seconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
