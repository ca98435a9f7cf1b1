"""Write a checkpoint folder so that it is either whole or absent, and recognise it the next time.

A folder is built under a temporary name beside its place and renamed; the manifest inside names the recipe (a hash of
the source model and of the code that made it) and the size of every file, so a stale or truncated one is rebuilt.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nvfp4lab.errors import LabError

MANIFEST_NAME = "nvfp4lab_fixture.json"


def recipe_of(name: str, files: list[Path]) -> str:
    """Hash of a fixture's name and of every file that decides its content."""
    digest = hashlib.sha256(name.encode())
    for path in files:
        with path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def build_once(directory: Path, recipe: str, fill: Callable[[Path], None]) -> Path:
    """`directory`, filled by `fill(temporary folder)` unless a whole one of the same recipe is there.

    Safe with concurrent builders (a lock file beside it, freed by the system when its holder dies) and with being
    killed: leftovers are temporary folders only. Raises LabError when `directory` holds something that is not ours.
    """
    _refuse_foreign(directory)  # once more under the lock; here so that a refusal leaves no lock file beside it
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock")):
        if _is_whole(directory, recipe):
            return directory
        _refuse_foreign(directory)
        for leftover in directory.parent.glob(f".{directory.name}.part-*"):
            shutil.rmtree(leftover)  # only a killed builder leaves one: we hold the lock
        part = Path(tempfile.mkdtemp(prefix=f".{directory.name}.part-", dir=directory.parent))
        try:
            fill(part)
            _write_manifest(part, recipe)
            part.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            part.rename(directory)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return directory


def copied(source: Path, directory: Path, recipe: str) -> bool:
    """Whether the empty folder `directory` now holds a copy of `source`, a whole build of `recipe`; if not, it is empty again.

    Modes are not copied, so a read-only source gives a folder that can be written. A source that is built anew meanwhile is
    another folder afterwards: files of two builds may have the same sizes.
    """
    if not _is_whole(source, recipe):
        return False
    with contextlib.suppress(OSError):
        build = source.stat().st_ino
        for name in sorted(_sizes(source)):
            shutil.copyfile(source / name, directory / name)
        shutil.copyfile(source / MANIFEST_NAME, directory / MANIFEST_NAME)
        if source.stat().st_ino == build and _is_whole(directory, recipe):
            return True
    shutil.rmtree(directory)
    directory.mkdir()
    return False


def write_model(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], tokenizer: Any) -> None:
    """Write model.safetensors, config.json, generation_config.json, tokenizer and chat template, in Hugging Face's layout."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes 0600; a server may run as another user
    write_json(directory / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    write_json(directory / "generation_config.json", generation)
    tokenizer.save_pretrained(directory)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, as Hugging Face writes it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != MANIFEST_NAME}


def _write_manifest(directory: Path, recipe: str) -> None:
    write_json(directory / MANIFEST_NAME, {"recipe": recipe, "size_bytes": _sizes(directory)})


def _is_whole(directory: Path, recipe: str) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        return manifest["recipe"] == recipe and manifest["size_bytes"] == _sizes(directory)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _refuse_foreign(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise LabError(f"{directory} is a file; name a folder for the fixture")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST_NAME).exists():
        raise LabError(f"{directory} holds files that are not a fixture; name an empty or a new folder")
