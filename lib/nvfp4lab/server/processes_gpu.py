"""GPU memory by device, from NVML. Without a driver there is none, and none to give back."""

import contextlib
import functools


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


def used_mib() -> tuple[float, ...]:
    """Memory in use on each GPU of this machine, in MiB; () without a GPU."""
    binding = nvml()
    if binding is None:
        return ()
    handles = [binding.nvmlDeviceGetHandleByIndex(index) for index in range(binding.nvmlDeviceGetCount())]
    return tuple(binding.nvmlDeviceGetMemoryInfo(handle).used / 2**20 for handle in handles)


def above(before_mib: tuple[float, ...]) -> float:
    """MiB in use now above the level `before_mib`, summed over the GPUs on which it rose."""
    return sum(max(0.0, now - before) for now, before in zip(used_mib(), before_mib, strict=False))
