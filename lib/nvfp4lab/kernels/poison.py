"""Memory that gives a kernel away which does not write: every byte 0xFF, which is NaN in bf16, fp16, fp32 and E4M3.

Without it a kernel with an empty body can pass: the allocator hands it a block that an expectation was computed in. Seen
with FlashInfer's nvfp4_quantize on an H200, whose body is compiled away for SM90.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nvfp4lab.kernels.operands import Problem
from nvfp4lab.kernels.reference import Kernel

POISON_BYTE = 0xFF
GUARD_ROWS = 16  # keeps the output's alignment for every N that is a multiple of 8


def poison_free_memory(device: torch.device) -> None:
    """Fill every block that the CUDA caching allocator could hand out next. Nothing to do on a CPU."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    held = [
        torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device) for size in free_blocks(torch.cuda.memory_snapshot())
    ]
    torch.cuda.synchronize(device)
    del held


def free_blocks(snapshot: Sequence[dict[str, Any]]) -> list[int]:
    """Sizes in bytes of the inactive blocks in `torch.cuda.memory_snapshot()`, largest first: so each request fits its block."""
    return sorted(
        (block["size"] for segment in snapshot for block in segment["blocks"] if block["state"] == "inactive"), reverse=True
    )


def poison_graph_memory(graph: torch.cuda.CUDAGraph) -> None:
    """Fill the memory that a captured graph keeps for itself; call it before its first replay, when nothing there means anything.

    A fused kernel's intermediate results live there. One that a launch of the graph leaves unwritten could still hold what an
    earlier graph of the same call wrote to the same place, and the final result would be right.
    """
    torch.cuda.synchronize()
    for segment in graph_segments(torch.cuda.memory_snapshot(), graph.pool()):
        torch.as_tensor(segment, device=torch.device("cuda", segment.device)).fill_(POISON_BYTE)
    torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Segment:
    """`size` bytes of one GPU's memory, which torch reads by the CUDA array interface."""

    device: int
    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def graph_segments(snapshot: Sequence[dict[str, Any]], pool: Sequence[int]) -> list[Segment]:
    """The segments in `torch.cuda.memory_snapshot()` that belong to the pool of that id."""
    ours = (segment for segment in snapshot if tuple(segment["segment_pool_id"]) == tuple(pool))
    return [Segment(segment["device"], segment["address"], segment["total_size"]) for segment in ours]


def untouched_share(output: torch.Tensor) -> float:
    """Share of the output's bytes that still hold the poison."""
    return (output.contiguous().view(torch.uint8) == POISON_BYTE).double().mean().item() if output.numel() else 0.0


class GuardBroken(Exception):
    """The kernel wrote outside its output; carries the result that says where."""


def run_poisoned(kernel: Kernel, problem: Problem) -> torch.Tensor:
    """Output of `kernel` from a buffer of NaN with guard rows on both sides.

    A kernel that allocates its own output gets poisoned memory too, from the allocator's free blocks.
    """
    rows, columns = problem.out_shape
    poison_free_memory(problem.device)
    poison = float("nan") if problem.out_dtype.is_floating_point else POISON_BYTE
    buffer = torch.full((rows + 2 * GUARD_ROWS, columns), poison, dtype=problem.out_dtype, device=problem.device)
    before = buffer.view(torch.uint8).clone()
    result = kernel(problem, buffer[GUARD_ROWS : GUARD_ROWS + rows])
    guards = torch.cat([buffer[:GUARD_ROWS], buffer[GUARD_ROWS + rows :]]).view(torch.uint8)
    touched = (guards != before[: 2 * GUARD_ROWS]).any(1).nonzero()
    if touched.numel():
        row = int(touched[0])
        raise GuardBroken(
            f"wrote outside its output: guard row {row - GUARD_ROWS if row < GUARD_ROWS else rows + row - GUARD_ROWS}"
        )
    return result
