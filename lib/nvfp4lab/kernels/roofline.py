"""What the card could do at best, measured on the card: memory bandwidth and matrix rates, and how near a kernel comes.

A data sheet's peak is for a clock that a loaded card does not hold. These peaks are measured in the same run, by the same
timer, with the vendor's own library: a copy of 1 GiB and one large square product for each number format.
"""

import dataclasses
from collections.abc import Callable

import torch

from nvfp4lab.kernels import timing
from nvfp4lab.records import Evidence, Number

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # far beyond any cache, yet brief
_SQUARE = {"cuda": 8192, "cpu": 1024}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Of one device. memory_gb_s counts bytes read plus bytes written. tflop_s: "fp4", "bf16", "fp32", where they ran.

    refused: number format -> why it could not be measured here. method: of the timer.
    """

    memory_gb_s: float
    tflop_s: dict[str, float]
    refused: dict[str, str]
    method: str

    def attainable_s(self, flops: float, min_bytes: float, arithmetic: str) -> float | None:
        """Least time of that work by the roofline model (Williams et al., CACM 52(4), 2009); None without that peak."""
        if arithmetic not in self.tflop_s:
            return None
        return max(flops / (self.tflop_s[arithmetic] * 1e12), min_bytes / (self.memory_gb_s * 1e9))

    def numbers(self) -> tuple[Number, ...]:
        """As numbers of an evidence record."""
        rates = tuple(Number(f"peak_{name}_tflop_s", value, "TFLOP/s") for name, value in self.tflop_s.items())
        return Number("peak_memory_gb_s", self.memory_gb_s, "GB/s"), *rates


def measure_peaks(device: str) -> Peaks:
    """Measure on "cuda" or "cpu"; seconds. Run it in a worker of its own: the formats may be refused in any manner."""
    place = torch.device(device)
    copied = _measure(_copy(place), place)
    size, rates, refused = _SQUARE[place.type], {}, {}
    for name, product in {"bf16": _bf16, "fp4": _fp4, "fp32": _fp32}.items():
        try:
            call = product(size, place)
            call()
            rates[name] = 2 * size**3 / _measure(call, place).median().value / 1e9
        except Exception as error:  # a library refuses a format in its own way: ValueError, RuntimeError, AttributeError
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Peaks(2 * _COPY_BYTES[place.type] / copied.median().value / 1e6, rates, refused, copied.method)


def _measure(call: Callable, place: torch.device) -> timing.Measurement:
    return timing.measure_gpu(call, place) if place.type == "cuda" else timing.measure_cpu(call)


def _copy(place: torch.device) -> Callable[[], torch.Tensor]:
    source = torch.ones(_COPY_BYTES[place.type], dtype=torch.uint8, device=place)
    sink = torch.empty_like(source)
    return lambda: sink.copy_(source)


def _bf16(size: int, place: torch.device) -> Callable[[], torch.Tensor]:
    a, b = (torch.randn(size, size, device=place).bfloat16() for _ in range(2))
    return lambda: a @ b


def _fp32(size: int, place: torch.device) -> Callable[[], torch.Tensor]:
    a, b = (torch.randn(size, size, device=place) for _ in range(2))
    return lambda: a @ b


def _fp4(size: int, place: torch.device) -> Callable[[], torch.Tensor]:
    """torch's own block-scaled product (cuBLASLt): e2m1 codes two a byte, one e4m3 scale per 16, scales in 128x4 tiles."""
    if place.type != "cuda":
        raise NotImplementedError("no FP4 product on a CPU")
    codes = (torch.randint(0, 256, (size, size // 2), device=place, dtype=torch.uint8) for _ in range(2))
    a, b = (one.view(torch.float4_e2m1fn_x2) for one in codes)
    scales = torch.ones(size * size // 16, device=place).to(torch.float8_e4m3fn)
    return lambda: torch._scaled_mm(a, b.t(), scales, scales, out_dtype=torch.bfloat16)


def with_fraction(row: Evidence, peaks: Peaks, arithmetic: str) -> Evidence:
    """`row` with the fraction of the roofline its time reaches; unchanged if it has no time or the card no such peak."""
    median, flops, min_bytes = (row.number(name) for name in ("median_ms", "flops", "min_bytes"))
    if median is None or flops is None or min_bytes is None:
        return row
    best_s = peaks.attainable_s(flops.value, min_bytes.value, arithmetic)
    if best_s is None:
        return row
    bound = "memory" if best_s > flops.value / (peaks.tflop_s[arithmetic] * 1e12) else "compute"
    fraction = Number(
        "roofline_fraction", best_s / (median.value / 1e3), "", best_s / (median.high / 1e3), best_s / (median.low / 1e3), median.n
    )
    details = dict(row.details) | {"roofline": {"bound": bound, "arithmetic": arithmetic}}
    return dataclasses.replace(row, numbers=(*row.numbers, fraction), details=details)
