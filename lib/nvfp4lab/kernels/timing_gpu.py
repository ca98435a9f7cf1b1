"""Clocks, power and temperature of a GPU while something runs on it: a fast kernel on a throttled card is no slow kernel."""

import contextlib
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import torch

from nvfp4lab.records import Number

_PERIOD_S = 0.01
# Reasons that mean the card was held back by heat or power, not idle or told so: NVML API, nvmlClocksEventReasons.
_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


class GpuState:
    """Samples taken every 10 ms: SM and memory clock in MHz, power in W, temperature in deg C, throttle bits."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float, float, int]] = []

    def numbers(self) -> tuple[Number, ...]:
        """Medians of the samples (temperature: the highest; throttled: fraction of samples), () without samples."""
        if not self.samples:
            return ()
        sm, memory, power, heat, reasons = zip(*self.samples, strict=True)
        count = len(self.samples)
        return (
            Number("sm_clock_mhz", statistics.median(sm), "MHz", min(sm), max(sm), count),
            Number("memory_clock_mhz", statistics.median(memory), "MHz", min(memory), max(memory), count),
            Number("power_w", statistics.median(power), "W", min(power), max(power), count),
            Number("temperature_c", max(heat), "C", n=count),
            Number("throttled_fraction", sum(bool(bits & _THROTTLED) for bits in reasons) / count, "", n=count),
        )


@contextlib.contextmanager
def watch(device: torch.device) -> Iterator[GpuState]:
    """Sample the GPU in a thread while the block runs. Without NVML the state stays empty."""
    state, stop = GpuState(), threading.Event()
    nvml, handle = _open(device)
    thread = threading.Thread(target=_sample, args=(nvml, handle, state, stop), daemon=True)
    if handle is not None:
        thread.start()
    try:
        yield state
    finally:
        stop.set()
        if handle is not None:
            thread.join()
            nvml.nvmlShutdown()


def _open(device: torch.device) -> tuple[Any, Any]:
    """(pynvml, handle of `device`) or (None, None). CUDA's numbering is not NVML's: the UUID joins them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding or no driver, in whatever way this machine lacks it
        return None, None
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    except (pynvml.NVMLError, RuntimeError, AssertionError):  # a card that NVML may not see, or torch without CUDA
        pynvml.nvmlShutdown()
        return None, None


def _sample(nvml: Any, handle: Any, state: GpuState, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            state.samples.append(
                (
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                    nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                )
            )
        except nvml.NVMLError:  # a virtual GPU may hide its clocks
            return
        stop.wait(_PERIOD_S)
