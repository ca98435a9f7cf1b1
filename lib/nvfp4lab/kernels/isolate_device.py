"""Is the GPU still sound after a case? A probe in a fresh context, and the Xids that the driver logged meanwhile."""

import contextlib
import os
import re
from typing import Any

from nvfp4lab import stack

_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<rest>.*)")
_NVML_WAIT_MS = 1


def probe_device() -> str:
    """Make a CUDA context, compute a sum whose value is known, wait for it; the device's name.

    Runs in a worker of its own. Raises RuntimeError if there is no usable GPU or its answer is wrong.
    """
    import torch

    numbers = torch.arange(4096, device="cuda", dtype=torch.float32)
    total = float(numbers.sum())  # waits
    if total != 4096 * 4095 / 2:
        raise RuntimeError(f"the device adds wrongly: 0 + ... + 4095 gave {total}")
    return torch.cuda.get_device_name()


def has_gpu() -> bool:
    """Whether a driver with at least one GPU is here; asks NVML, so CUDA stays untouched in this process."""
    return stack.here().cc != "cpu"


def parse_xids(kernel_log: str) -> tuple[str, ...]:
    """Xid lines of a kernel log as "PCI:0000:01:00: 31, pid=..., MMU Fault: ..."."""
    return tuple(f"{found['device']}: {found['rest'].strip()}" for found in map(_XID.search, kernel_log.splitlines()) if found)


class XidWatch:
    """Collects Xid errors from now on: NVML events where there is a driver, else the kernel log where it is readable."""

    def __init__(self) -> None:
        self._nvml, self._events = _nvml_events()
        self._log_fd = -1
        if self._events is None:
            with contextlib.suppress(OSError):  # not root, or a container without it
                self._log_fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._log_fd, 0, os.SEEK_END)

    def drain(self) -> tuple[str, ...]:
        """Xids since the last call, as text."""
        if self._events is not None:
            return tuple(self._drain_nvml())
        lines = []
        with contextlib.suppress(OSError):  # EAGAIN: nothing more; EBADF: no log to read
            while True:
                lines.append(os.read(self._log_fd, 8192).decode(errors="replace"))
        return parse_xids("\n".join(lines))

    def _drain_nvml(self) -> Any:
        while True:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, _NVML_WAIT_MS)
            except self._nvml.NVMLError:  # time-out: nothing more
                return
            bus = self._nvml.nvmlDeviceGetPciInfo(event.device).busId
            yield f"PCI:{bus if isinstance(bus, str) else bus.decode()}: {event.eventData}"

    def close(self) -> None:
        """Release the event set or the log."""
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
            self._events = None
        elif self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1


def _nvml_events() -> tuple[Any, Any]:
    """(pynvml, event set registered for Xids on every GPU) or (None, None)."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding or no driver, in whatever way this machine lacks it
        return None, None
    try:
        events = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(index), pynvml.nvmlEventTypeXidCriticalError, events)
    except pynvml.NVMLError:  # containers often forbid events
        pynvml.nvmlShutdown()
        return None, None
    return pynvml, events
