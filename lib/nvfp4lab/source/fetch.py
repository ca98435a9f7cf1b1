"""Fetches one wheel from the package index that pip is configured for, once, and keeps it by its sha256."""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from nvfp4lab import atomic
from nvfp4lab.errors import LabError

# Source is the same in every platform's wheel, so any one will do; these are tried in order until one exists.
_PLATFORMS = ("any", "manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_34_aarch64")
_PYTHONS = ("3.12", "3.11", "3.10")
_TIMEOUT_S = 900


def cache_dir() -> Path:
    """Where wheels and indices are kept: $NVFP4LAB_CACHE, else $XDG_CACHE_HOME/nvfp4lab, else ~/.cache/nvfp4lab."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NVFP4LAB_CACHE") or Path(home) / "nvfp4lab")


def wheel(distribution: str, version: str) -> Path:
    """Path of the cached wheel of `distribution` at `version`; fetched if it is not there yet.

    Raises LabError: the version does not exist, no network, pip missing, or the cached file has changed.
    """
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{distribution}-{version}.json"
    with (folder / f".{distribution}-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands that want one wheel fetch it once
        if note.exists():
            row = json.loads(note.read_text(encoding="utf-8"))
            path = folder / row["sha256"] / row["file"]
            if path.exists() and path.stat().st_size == row["bytes"]:
                return path
        return _download(distribution, version, folder, note)


def _download(distribution: str, version: str, folder: Path, note: Path) -> Path:
    print(f"fetching {distribution} {version} (once; kept in {folder})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        said = ""
        for python in _PYTHONS:
            done = _pip_download(distribution, version, python, Path(scratch))
            wheels = list(Path(scratch).glob("*.whl"))
            if done.returncode == 0 and wheels:
                return _keep(wheels[0], folder, note)
            said = said or done.stderr  # the newest Python has the longest list of versions
            if _is_network(done.stderr):
                break
        raise LabError(_explain(distribution, version, said), exit_code=3 if _is_network(said) else 1)


def _pip_download(distribution: str, version: str, python: str, scratch: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--progress-bar=off",
        "--retries=2",
    ]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(scratch)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    try:
        return subprocess.run(
            [*command, f"{distribution}=={version}"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(
            f"{distribution} {version}: pip gave no wheel within {_TIMEOUT_S} s; try again or give a wheel file", 3
        ) from error


def _keep(found: Path, folder: Path, note: Path) -> Path:
    with found.open("rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    kept = folder / sha256 / found.name
    kept.parent.mkdir(exist_ok=True)
    found.replace(kept)
    row = {"file": found.name, "sha256": sha256, "bytes": kept.stat().st_size}
    atomic.replace(note, json.dumps(row))
    return kept


def _is_network(said: str) -> bool:
    words = ("Temporary failure in name resolution", "NewConnectionError", "Connection refused", "Name or service not known")
    return any(word in said for word in (*words, "timed out", "ProxyError", "Network is unreachable"))


def _explain(distribution: str, version: str, said: str) -> str:
    if "No module named pip" in said:
        return f"{distribution} {version}: this Python has no pip to fetch it with; install pip or give a wheel file"
    if _is_network(said):
        return f"{distribution} {version}: the package index cannot be reached; check the network or give a wheel file or folder"
    if known := re.search(r"from versions: ([^)]*)\)", said):
        nearest = [text for text in known[1].split(", ") if text.split(".")[:2] == version.split(".")[:2]] or known[1].split(", ")
        return f"{distribution} {version}: no such version on the package index; nearest: {', '.join(nearest[-8:])}"
    last = next((line for line in reversed(said.strip().splitlines()) if line.startswith("ERROR")), "pip failed without a message")
    return f"{distribution} {version}: {last}"
