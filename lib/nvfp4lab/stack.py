"""Captures what decides behaviour here: package versions, CUDA, driver, GPU, and the lab's own commit.

Nothing heavy is imported: versions come from package metadata, the GPU from NVML. Captured once per process.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path
from typing import Any

from nvfp4lab.records import Stack, Target
from nvfp4lab.server import processes_gpu


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _named_version(*names: str) -> str | None:
    """'name version' of the first package that is installed."""
    return next((f"{name} {_version(name)}" for name in names if _version(name)), None)


def _torch_cuda() -> str | None:
    """CUDA version that torch was built for, from the text of torch/version.py (importing torch costs seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py")
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    found = next((line.split("=")[-1].strip(" '\"") for line in lines if line.startswith("cuda")), "None")
    return None if found == "None" else found


@functools.lru_cache(maxsize=1)
def _gpus() -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """(driver version, ((name, cc), ...)) of the GPUs that we may use, from NVML; (None, ()) without driver or binding."""
    binding = processes_gpu.nvml()
    if binding is None:
        return None, ()
    return binding.nvmlSystemGetDriverVersion(), tuple(_card(binding, handle) for handle in processes_gpu.handles())


def _card(binding: Any, handle: Any) -> tuple[str, str]:
    with contextlib.suppress(binding.NVMLError):  # raised for all that is no MIG instance; of one, the card tells
        handle = binding.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return binding.nvmlDeviceGetName(handle), "{}.{}".format(*binding.nvmlDeviceGetCudaComputeCapability(handle))


def _lab_commit() -> str | None:
    """Commit of the checkout this file is in, with '+' when the tree differs from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "-C", here, "status", "--porcelain", "--", here], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def _machine() -> str:
    """'AMD EPYC ..., 2 cores' as far as the system tells."""
    import psutil

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return f"{model}, {psutil.cpu_count()} cores"


@functools.lru_cache(maxsize=1)
def capture() -> Stack:
    """The Stack of this process's environment."""
    driver, cards = _gpus()
    return Stack(
        sglang=_version("sglang"),
        flashinfer=_version("flashinfer-python"),
        kernel_package=_named_version("sglang-kernel", "sgl-kernel"),
        torch=_version("torch"),
        cuda=_torch_cuda(),
        cudnn=_version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        driver=driver,
        gpu=f"{len(cards)}x {cards[0][0]}" if cards else None,
        python=platform.python_version(),
        machine=_machine(),
        lab_commit=_lab_commit(),
    )


def gpu_names() -> tuple[str, ...]:
    """Product names of the GPUs here, by index; empty without any."""
    return tuple(name for name, _ in _gpus()[1])


def here() -> Target:
    """The first GPU of this machine, or the CPU."""
    _, cards = _gpus()
    return Target(cc=cards[0][1], present=True, name=cards[0][0]) if cards else Target(cc="cpu", present=True, name=_machine())
