"""Puts the CUDA sources of one package version on disk: installed where they are, unpacked from the wheel otherwise."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import os
import re
import zipfile
from pathlib import Path

from nvfp4lab.errors import LabError
from nvfp4lab.source import fetch
from nvfp4lab.source.package import LAYOUTS, resolve

# What a build reads, per package: kernels, headers, and the Python that lists the instances.
_WANTED = {
    "flashinfer": (
        "flashinfer/jit/",
        "flashinfer/data/csrc/",
        "flashinfer/data/include/",
        "flashinfer/data/cutlass/include/",
        "flashinfer/data/cutlass/tools/util/include/",
        "flashinfer/data/cccl/",
        "flashinfer/data/spdlog/include/",
    ),
    "sglang": ("sglang/kernels/jit/", "sglang/jit_kernel/"),
}


@dataclasses.dataclass(frozen=True)
class Sources:
    """Sources of one package version.

    root: folder that holds the package's top folder. digest: changes when any source file does.
    """

    package: str
    version: str
    root: Path
    digest: str


def locate(package: str, version: str) -> Sources:
    """Sources of `package` ("flashinfer", "sglang") at a PyPI version, wheel file, or folder that holds the package.

    Raises LabError where the version cannot be had.
    """
    path = Path(version).expanduser()
    if path.is_dir():
        return Sources(package, "unknown", path, _digest_of_folder(path, package))
    if path.is_file():
        return _unpacked(package, path)
    layout = LAYOUTS[package]
    try:
        installed = importlib.metadata.distribution(layout.distribution)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is not None and installed.version == version and installed.read_text("RECORD"):
        return Sources(package, version, Path(installed.locate_file("")), _digest(installed.read_text("RECORD"), package))
    return _unpacked(package, fetch.wheel(layout.distribution, version))


def _unpacked(package: str, wheel: Path) -> Sources:
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            digest = _digest(archive.read(record).decode(), package)
            root = fetch.cache_dir() / "sources" / f"{package}-{digest}"
            root.mkdir(parents=True, exist_ok=True)
            with (root / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (root / ".complete").exists():
                    archive.extractall(root, [name for name in archive.namelist() if name.startswith(_WANTED[package])])
                    (root / ".complete").touch()
    except (zipfile.BadZipFile, StopIteration) as error:
        raise LabError(f"{wheel}: not a wheel: {error}") from error
    return Sources(package, wheel.name.split("-")[1], root, digest)


def _digest(record: str, package: str) -> str:
    """Of the hashes that the package's RECORD lists for what a build reads."""
    lines = sorted(line for line in record.splitlines() if line.startswith(_WANTED[package]) and "__pycache__" not in line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _digest_of_folder(root: Path, package: str) -> str:
    """Of name, size and time of every source file: a checkout has no RECORD."""
    facts = []
    for wanted in _WANTED[package]:
        for folder, _, files in sorted(os.walk(root / wanted)):
            stats = ((Path(folder) / name).stat() for name in sorted(files))
            facts += [(folder, name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(sorted(files), stats, strict=True)]
    if not facts:
        raise LabError(f"{root}: holds no CUDA sources of {package}: looked for {', '.join(_WANTED[package])}")
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def pinned_flashinfer(sglang: str) -> str:
    """The FlashInfer version that this SGLang requires, from its metadata. Raises LabError if it names none."""
    package = resolve(sglang, "sglang")
    member = package.metadata_member()
    text = package.tree.read(member).decode("utf-8", errors="replace") if member else ""
    pin = re.search(r"flashinfer[_-]python\s*(?:\[[^\]]*\])?\s*\(?==\s*([\w.+]+)", text, re.IGNORECASE)
    if pin is None:
        raise LabError(f"{package.origin}: pins no version of flashinfer; name one with the parameter `flashinfer`")
    return pin[1]
