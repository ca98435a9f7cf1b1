"""GPU memory by device, from NVML. Without a driver there is none, and none to give back."""

import contextlib
import functools
import itertools
import os
from collections.abc import Mapping
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache
def nvml():
    """The NVML binding, initialised once a process; None without driver or binding."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None


def visible(env: Mapping[str, str] = os.environ) -> list[tuple[str, Any]]:
    """(name, NVML handle) of the GPUs that a process with this environment may use: another job's GPUs are not ours.

    CUDA_VISIBLE_DEVICES names them by index, by the beginning of a UUID or as a MIG instance, and ends at the first name
    that is none (CUDA C++ programming guide, environment variables). Indices count as NVML does, by PCI bus; CUDA does so
    too on a host whose GPUs are all alike, elsewhere with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    binding = nvml()
    if binding is None:
        return []
    devices = [binding.nvmlDeviceGetHandleByIndex(index) for index in range(binding.nvmlDeviceGetCount())]
    if VISIBLE not in env:
        return [(str(index), handle) for index, handle in enumerate(devices)]
    named = ((name, _named(name, devices, binding)) for name in map(str.strip, env[VISIBLE].split(",")))
    return list(itertools.takewhile(lambda pair: pair[1] is not None, named))


def handles(env: Mapping[str, str] = os.environ) -> list[Any]:
    """The handles alone of `visible`."""
    return [handle for _, handle in visible(env)]


def _named(name: str, devices: list[Any], binding: Any) -> Any | None:
    if name.isdecimal():
        return devices[int(name)] if int(name) < len(devices) else None
    if name.startswith("GPU-"):
        return next((handle for handle in devices if binding.nvmlDeviceGetUUID(handle).startswith(name)), None)
    if name.startswith("MIG-"):
        with contextlib.suppress(binding.NVMLError):
            return binding.nvmlDeviceGetHandleByUUID(name)
    return None


def used_mib(env: Mapping[str, str] = os.environ) -> tuple[float, ...]:
    """Memory in use on each GPU that a process with this environment may use, in MiB; () without a GPU."""
    return tuple(nvml().nvmlDeviceGetMemoryInfo(handle).used / 2**20 for handle in handles(env))


def above(before_mib: tuple[float, ...], env: Mapping[str, str] = os.environ) -> float:
    """MiB in use now above the level `before_mib`, summed over the GPUs on which it rose."""
    return sum(max(0.0, now - before) for now, before in zip(used_mib(env), before_mib, strict=False))
