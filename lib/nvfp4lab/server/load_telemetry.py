"""Power, clocks and temperature of the GPUs while something runs, from NVML. Without a GPU there is nothing to tell."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence

from nvfp4lab.records import Number
from nvfp4lab.server import processes_gpu

PERIOD_S = 0.2


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look at one GPU. throttled: held back by heat or by the power limit."""

    power_w: float
    sm_clock_mhz: float
    temperature_c: float
    throttled: bool


class Telemetry:
    """Samples GPUs in a thread while its block runs: the first `count` (None: all) that a process with `env` may use.

    A server's own: an idle neighbour's watts would halve the mean.
    """

    def __init__(self, env: Mapping[str, str] = os.environ, count: int | None = None):
        self._env, self._count = env, count
        self.readings: list[Reading] = []
        self._nvml = processes_gpu.nvml()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Telemetry":
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        nvml = self._nvml
        handles = processes_gpu.handles(self._env)[: self._count]
        while not self._over.wait(PERIOD_S):
            with contextlib.suppress(nvml.NVMLError):  # a virtual GPU may not tell its power: then there is no reading
                self.readings += [self._read(handle) for handle in handles]

    def _read(self, handle) -> Reading:
        nvml = self._nvml
        slow = nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwSlowdown
        slow |= nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        return Reading(
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow),
        )


def numbers(readings: Sequence[Reading]) -> tuple[Number, ...]:
    """Mean with lowest and highest of each quantity, and the share of samples in which a GPU was throttled."""
    if not readings:
        return ()
    columns = (("power", "power_w", "W"), ("sm_clock", "sm_clock_mhz", "MHz"), ("temperature", "temperature_c", "C"))
    found = []
    for name, field, unit in columns:
        values = [getattr(reading, field) for reading in readings]
        found.append(Number(name, sum(values) / len(values), unit, min(values), max(values), len(values)))
    throttled = sum(reading.throttled for reading in readings) / len(readings)
    return (*found, Number("throttled_share", throttled, "1", n=len(readings)))
