"""Xids are collected from NVML where there is a driver; without one nothing is claimed."""

import sys
import types

from nvfp4lab.kernels import isolate_device


class NVMLError(Exception):
    """As pynvml's: also what a wait that times out raises."""


def nvml(events: list[tuple[str, int]], forbids_events: bool = False) -> types.SimpleNamespace:
    """A driver with two GPUs and these (bus, Xid) to tell."""
    log: list[str] = []

    def wait(handle, timeout_ms):
        if not events:
            raise NVMLError("timeout")
        bus, xid = events.pop(0)
        return types.SimpleNamespace(device=bus, eventData=xid)

    def register(device, kinds, handle):
        if forbids_events:
            raise NVMLError("no permission")
        log.append(f"register {device}")

    return types.SimpleNamespace(
        log=log,
        NVMLError=NVMLError,
        nvmlEventTypeXidCriticalError=8,
        nvmlInit=lambda: log.append("init"),
        nvmlShutdown=lambda: log.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlEventSetCreate=lambda: "set",
        nvmlEventSetFree=lambda handle: log.append("free"),
        nvmlDeviceRegisterEvents=register,
        nvmlEventSetWait_v2=wait,
        nvmlDeviceGetPciInfo=lambda device: types.SimpleNamespace(busId=device),
    )


def test_xids_of_every_gpu_are_told_once(monkeypatch):
    fake = nvml([("0000:3B:00.0", 31), ("0000:AF:00.0", 79)])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    watch = isolate_device.XidWatch()
    assert watch.drain() == ("PCI:0000:3B:00.0: 31", "PCI:0000:AF:00.0: 79")
    assert watch.drain() == ()
    watch.close()
    assert fake.log == ["init", "register gpu0", "register gpu1", "free", "shutdown"]


def test_a_container_that_forbids_events_is_no_failure(monkeypatch):
    fake = nvml([("0000:3B:00.0", 31)], forbids_events=True)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    watch = isolate_device.XidWatch()
    assert not any("31" in xid for xid in watch.drain())
    watch.close()
    assert fake.log == ["init", "shutdown"]
