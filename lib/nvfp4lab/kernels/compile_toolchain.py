"""Finds nvcc and something that reads machine code. Nothing is assumed: a machine without them gets a reason."""

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from nvfp4lab.errors import LabError


class NoToolchain(LabError):
    """nvcc, or a program that reads its output, is not here."""

    def __init__(self, message: str):
        super().__init__(message, exit_code=3)


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A compiler and a disassembler.

    release: nvcc's own build string; names the compiler in caches and records.
    include_dirs: CUDA headers from Python packages, for what a small toolkit lacks (curand); searched after its own.
    """

    nvcc: Path
    cuobjdump: Path
    release: str
    include_dirs: tuple[Path, ...]


@functools.lru_cache(maxsize=1)
def find() -> Toolchain:
    """The toolchain of $CUDA_HOME, else of PATH, else of /usr/local/cuda. Raises NoToolchain with what is missing."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = _first(*(home / "nvcc" for home in homes), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise NoToolchain("no nvcc here: install a CUDA toolkit (13.0 or later for all targets) or set CUDA_HOME")
    cuobjdump = _first(
        nvcc.with_name("cuobjdump"),
        shutil.which("cuobjdump"),
        "/usr/local/cuda/bin/cuobjdump",
        *(folder / "backends/nvidia/bin/cuobjdump" for folder in _package_folders("triton")),
    )
    if cuobjdump is None:
        raise NoToolchain("no cuobjdump here: install the CUDA binary utilities, or the triton package, which carries one")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    build = re.search(r"^Build (\S+)", said, re.MULTILINE)
    if build is None:
        raise NoToolchain(f"{nvcc} --version does not name its build; it said {said.strip()[-200:]!r}")
    headers = [found for folder in _package_folders("nvidia") for found in sorted(folder.glob("*/include"))]
    return Toolchain(nvcc, cuobjdump, build[1], tuple(headers))


def tvm_ffi_headers() -> list[Path]:
    """Header folders of apache-tvm-ffi, with which SGLang's kernels are written; empty if it is not installed."""
    return [folder / "include" for folder in _package_folders("tvm_ffi")]


def _first(*candidates: Path | str | None) -> Path | None:
    return next((Path(one) for one in candidates if one and Path(one).is_file()), None)


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []
