"""Read the scale tensors of a checkpoint, and only those, in bounded memory.

Block scales are one byte per 16 weights: 25 GB for a 397B model. Each chunk is cleared by its smallest and largest
byte; only a chunk that holds an odd byte is counted. The fp32 scalars lie side by side in a safetensors file, so a
window of a megabyte serves thousands of them.
"""

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from nvfp4lab.nvfp4.checkpoint import TensorInfo

CHUNK_BYTES = 4 << 20
_WINDOW_BYTES = 1 << 20
_THREADS = 4
_FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_E4M3_NAN, _E4M3_MAX_BYTE = 0x7F, 0x7E


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScaleCounts:
    """What the bytes of one E4M3 block-scale tensor hold. `first_bad`: flat index of the first that is not positive."""

    total: int
    zero: int = 0
    nan: int = 0
    negative: int = 0
    first_bad: int | None = None


@dataclasses.dataclass(frozen=True)
class Scales:
    """scalars: values of every small float tensor read, by name. blocks: counts of every E4M3 block-scale tensor."""

    scalars: Mapping[str, tuple[float, ...]]
    blocks: Mapping[str, BlockScaleCounts]


def read_scales(scalars: Iterable[TensorInfo], blocks: Iterable[TensorInfo]) -> Scales:
    """Read the given tensors; those cut off by the end of their file are left out. Raises OSError of the disk."""
    work: dict[Path, tuple[list[TensorInfo], list[TensorInfo]]] = {}
    for which, infos in enumerate((scalars, blocks)):
        for info in infos:
            work.setdefault(info.file, ([], []))[which].append(info)
    values: dict[str, tuple[float, ...]] = {}
    counts: dict[str, BlockScaleCounts] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:  # numpy and pread release the GIL
        for shard_values, shard_counts in pool.map(lambda item: _read_shard(item[0], *item[1]), work.items()):
            values |= shard_values
            counts |= shard_counts
    return Scales(values, counts)


def _read_shard(path: Path, scalars: list[TensorInfo], blocks: list[TensorInfo]) -> tuple[dict, dict]:
    size = path.stat().st_size
    handle = os.open(path, os.O_RDONLY)
    try:
        window = _Window(handle)
        values = {info.name: window.floats(info) for info in sorted(scalars, key=lambda info: info.start) if info.stop <= size}
        buffer = bytearray(CHUNK_BYTES)
        in_order = sorted((info for info in blocks if info.stop <= size), key=lambda info: info.start)
        counts = {info.name: _count(handle, info, buffer) for info in in_order}
    finally:
        os.close(handle)
    return values, counts


class _Window:
    """Serves small reads at rising offsets from one buffer."""

    def __init__(self, handle: int):
        self.handle, self.start, self.data = handle, 0, b""

    def floats(self, info: TensorInfo) -> tuple[float, ...]:
        """Values of a small F32, F16, BF16 or F64 tensor, flat."""
        if not (self.start <= info.start and info.stop <= self.start + len(self.data)):
            self.start = info.start
            self.data = os.pread(self.handle, max(_WINDOW_BYTES, info.stop - info.start), info.start)
        raw = self.data[info.start - self.start : info.stop - self.start]
        if info.dtype == "BF16":
            return tuple((np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").tolist())
        return tuple(np.frombuffer(raw, _FLOATS[info.dtype]).tolist())


def _count(handle: int, info: TensorInfo, buffer: bytearray) -> BlockScaleCounts:
    zero = nan = negative = 0
    first_bad = None
    for start in range(info.start, info.stop, CHUNK_BYTES):
        length = min(CHUNK_BYTES, info.stop - start)
        os.preadv(handle, [memoryview(buffer)[:length]], start)
        codes = np.frombuffer(buffer, np.uint8, length)
        if codes.min() > 0 and codes.max() <= _E4M3_MAX_BYTE:
            continue
        magnitude = codes & 0x7F
        is_zero, is_nan = magnitude == 0, magnitude == _E4M3_NAN
        is_negative = (codes & 0x80 != 0) & ~is_nan & ~is_zero
        if first_bad is None:
            first_bad = start - info.start + int(np.argmax(is_zero | is_nan | is_negative))
        zero += int(is_zero.sum())
        nan += int(is_nan.sum())
        negative += int(is_negative.sum())
    return BlockScaleCounts(math.prod(info.shape), zero, nan, negative, first_bad)
