"""Times single calls with CUDA events and a flushed L2: the last resort where FlashInfer's timer is not installed."""

from collections.abc import Callable
from typing import Any

import torch

_CALLS = (10, 1000)  # fewest and most


def bench(call: Callable[[], Any], dry_run_time_ms: float, repeat_time_ms: float) -> list[float]:
    """Times in ms, launch overhead included, of as many calls as fit into `repeat_time_ms` within bounds."""
    flush = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda")
    once_ms = max(1e-3, _time([_call(call, flush) for _ in range(5)])[-1])
    for _ in range(_count(dry_run_time_ms, once_ms)):
        call()
    return _time([_call(call, flush) for _ in range(_count(repeat_time_ms, once_ms))])


def _count(budget_ms: float, once_ms: float) -> int:
    return max(_CALLS[0], min(_CALLS[1], int(budget_ms / once_ms)))


def _call(call: Callable[[], Any], flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    return start, end


def _time(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
