"""Readable members of a wheel or a folder, by the names they have in a wheel. Reads only; never extracts."""

import hashlib
import os
import stat
import zipfile
from pathlib import Path
from typing import Protocol

from nvfp4lab.errors import LabError

MEMBER_LIMIT_BYTES = 32 << 20  # the largest text member seen is 2 MB; a bigger one is a bomb or a binary
TOTAL_LIMIT_BYTES = 2 << 30
TEXT_SUFFIXES = (".py", ".cuh", ".cu", ".h", ".hpp", ".cpp", ".cc", ".inc", ".jinja", ".toml", ".txt", "METADATA")


class Tree(Protocol):
    """Members by wheel name. `read` returns the bytes of one member and raises LabError when it cannot be trusted."""

    origin: str

    def names(self) -> tuple[str, ...]: ...
    def __contains__(self, name: str) -> bool: ...
    def read(self, name: str) -> bytes: ...
    def digest(self) -> str: ...


def _is_wanted(name: str) -> bool:
    return name.endswith(TEXT_SUFFIXES)


class WheelTree:
    """Members of one wheel, read in place.

    Names that would leave the archive (`../`, absolute, drive letters, backslashes) are not members. A member that
    unpacks beyond its limit, or to something else than its checksum, raises LabError.
    """

    def __init__(self, path: Path):
        self.origin = str(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise LabError(f"{path}: not a readable wheel (zip): {error}") from error
        self._infos = {
            info.filename: info for info in self._zip.infolist() if _is_wanted(info.filename) and _is_inside(info.filename)
        }
        self._names = tuple(sorted(self._infos))
        self._read_bytes = 0

    def names(self) -> tuple[str, ...]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def read(self, name: str) -> bytes:
        info = self._infos[name]
        if info.file_size > MEMBER_LIMIT_BYTES:
            raise LabError(
                f"{self.origin}: member {name} unpacks to {info.file_size >> 20} MiB, more than any source file; not read"
            )
        self._read_bytes += info.file_size
        if self._read_bytes > TOTAL_LIMIT_BYTES:
            raise LabError(f"{self.origin}: unpacks to more than {TOTAL_LIMIT_BYTES >> 30} GiB of text; refused as a zip bomb")
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
            raise LabError(f"{self.origin}: member {name} is damaged: {error}; delete the file and fetch it again") from error

    def digest(self) -> str:
        """Hash of all members' names, sizes and checksums as the zip directory states them; `read` verifies them."""
        rows = "\n".join(f"{name} {info.file_size} {info.CRC:08x}" for name, info in sorted(self._infos.items()))
        return hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return not (name.startswith("/") or "\\" in name or ".." in parts or ":" in parts[0])


class FolderTree:
    """Members of an installed package folder or a checkout: everything below `root/top`, and its metadata beside it."""

    def __init__(self, root: Path, top: str):
        self.origin = str(root / top)
        self._root = root
        self._paths = {path.relative_to(root).as_posix(): path for path in _walk(root / top)}
        for path in [*root.glob(f"{top}*.dist-info/METADATA"), root / "pyproject.toml", root / "version.txt"]:
            if path.is_file():
                self._paths[path.relative_to(root).as_posix()] = path
        if (root / "pyproject.toml").is_file():  # a FlashInfer checkout keeps beside it what the wheel ships as data/
            for path in [*_walk(root / "csrc"), *_walk(root / "include")]:
                self._paths.setdefault(f"{top}/data/{path.relative_to(root).as_posix()}", path)
        self._names = tuple(sorted(self._paths))

    def names(self) -> tuple[str, ...]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def read(self, name: str) -> bytes:
        path = self._paths[name]
        try:
            with path.open("rb") as handle:
                data = handle.read(MEMBER_LIMIT_BYTES + 1)
        except OSError as error:
            raise LabError(f"{path}: cannot be read: {error}") from error
        if len(data) > MEMBER_LIMIT_BYTES:
            raise LabError(f"{path}: more than {MEMBER_LIMIT_BYTES >> 20} MiB, larger than any source file; not read")
        return data

    def digest(self) -> str:
        """Hash of the names and bytes of all members."""
        total = hashlib.blake2b(digest_size=16)
        for name in self.names():
            total.update(name.encode() + b"\0" + hashlib.blake2b(self.read(name), digest_size=16).digest())
        return total.hexdigest()


def _walk(top: Path):
    """Regular text files below `top`; links are not followed, so a tree cannot lead the reader out of itself."""
    for folder, subfolders, files in os.walk(top):
        subfolders[:] = sorted(name for name in subfolders if name not in ("__pycache__", ".git"))
        for name in files:
            path = Path(folder, name)
            if _is_wanted(name) and stat.S_ISREG(path.lstat().st_mode):
                yield path
