"""GPU memory is that of the GPUs a server may use; another job's GPUs on the same host are not counted."""

import os
import sys
import types

import pytest

from launch_kinds import FAKE, PATIENT
from nvfp4lab import stack
from nvfp4lab.batch.executors import local_engine
from nvfp4lab.server import load_telemetry, processes_gpu
from nvfp4lab.server.launch import Server


class FourGpus:
    """As pynvml: four GPUs with 100, 200, 400 and 800 MiB in use, and a MIG instance with 1600."""

    class NVMLError(Exception):
        pass

    uuids = ("GPU-0a11", "GPU-0b22", "GPU-1c33", "GPU-2d44")

    def __init__(self):
        self.used_mib = [100, 200, 400, 800, 1600]

    def nvmlDeviceGetCount(self):
        return 4

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-5e55":
            raise self.NVMLError
        return 4

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        if handle != 4:
            raise self.NVMLError
        return 3

    def nvmlDeviceGetName(self, handle):
        return ("A", "B", "C", "D")[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, handle)

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=self.used_mib[handle] * 2**20)


@pytest.fixture
def gpus(monkeypatch):
    fake = FourGpus()
    monkeypatch.setattr(processes_gpu, "nvml", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("visible", "expected_mib"),
    [
        (None, (100, 200, 400, 800)),
        ("2", (400,)),
        ("3, 0", (800, 100)),
        ("", ()),
        ("-1", ()),
        ("1,7,0", (200,)),
        ("GPU-1c,GPU-0a11", (400, 100)),
        ("GPU-ff,0", ()),
        ("MIG-5e55", (1600,)),
        ("MIG-none,0", ()),
    ],
)
def test_only_visible_gpus_count(gpus, visible, expected_mib):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert processes_gpu.used_mib(env) == expected_mib


def test_without_a_driver_there_are_none(monkeypatch):
    monkeypatch.setattr(processes_gpu, "nvml", lambda: None)
    assert processes_gpu.used_mib({"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(("grows", "left_mib"), [(0, 0.0), (1, 5000.0)])
def test_another_jobs_memory_is_not_our_leftover(gpus, tmp_path, grows, left_mib):
    """GPU 0 belongs to another job, which takes 5000 MiB meanwhile; on our own GPU 1 the same is a leftover."""
    command = [sys.executable, "-I", "-S", str(FAKE)]
    limits = type(PATIENT)(term_s=0.3, release_s=0.2, poll_s=0.02)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    with Server("x", lambda port: [*command, str(port), "healthy"], env, tmp_path, limits) as server:
        gpus.used_mib[grows] += 5000
    assert server.ending.left_gpu_mib == left_mib
    assert server.ending.clean is (left_mib == 0)


@pytest.mark.parametrize(("visible", "names", "cc"), [("2,1", ("C", "B"), "9.2"), ("MIG-5e55", ("D",), "9.3"), ("", (), "cpu")])
def test_the_stack_names_our_gpus(gpus, monkeypatch, visible, names, cc):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(stack, "_gpus", stack._gpus.__wrapped__)  # what the real one remembers stays
    assert stack.gpu_names() == names
    assert stack.here().cc == cc


def test_a_run_hands_out_only_the_gpus_it_was_given(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-0a11")
    wants_one = types.SimpleNamespace(needs=types.SimpleNamespace(gpus=1, memory_gib=0.0))
    line = local_engine._Line([wants_one] * 3)
    assert [line.take()[1] for _ in range(2)] == [["3"], ["GPU-0a11"]]
    line.give_back(wants_one, ["3"])
    assert line.take()[1] == ["3"]


def test_telemetry_reads_only_our_gpus(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(load_telemetry, "PERIOD_S", 0.01)
    asked = []
    monkeypatch.setattr(load_telemetry.Telemetry, "_read", lambda self, handle: asked.append(handle) or handle)
    with load_telemetry.Telemetry() as telemetry:
        while len(telemetry.readings) < 3:
            pass
    assert set(asked) == {2}
