"""A checkpoint folder as its safetensors headers describe it: names, dtypes, shapes and places, without the weights.

The format is read here, not through a library, because the audit must survive and name what a library refuses: a
truncated shard, a header that lies about its sizes, an index that names absent files. Nothing is ever unpickled.
Memory: about 1 kB a tensor, whatever its size.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError

_NUMBERED = re.compile(r"(?P<stem>.+)-\d{1,6}-of-(?P<count>\d{1,6})\.safetensors")
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes [start, stop) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def is_consistent(self) -> bool:
        """Whether dtype and shape fill the bytes. An unknown dtype passes: newer safetensors have more."""
        bits = DTYPE_BITS.get(self.dtype)
        return bits is None or math.prod(self.shape) * bits == (self.stop - self.start) * 8


@dataclasses.dataclass(frozen=True)
class Defect:
    """Something wrong with the files themselves. kind: a finding kind of `audit`; name: the tensor or the file."""

    kind: str
    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything known of a checkpoint without reading a weight.

    config: config.json; quant_config: its `quantization_config`; hf_quant_config: the file of that name; {} if absent.
    defects: what is wrong with the files; tensors of damaged shards are listed as far as their header goes.
    """

    directory: Path
    config: Mapping[str, Any]
    quant_config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    defects: tuple[Defect, ...]

    @property
    def is_partial(self) -> bool:
        """Whether the tensors of some shard are unknown, so that nothing can be called missing."""
        read = {info.file.name for info in self.tensors.values()}
        of_shards = ("shard_missing", "shard_truncated", "header_malformed")
        return any(
            defect.kind in of_shards and defect.name not in self.tensors and defect.name not in read for defect in self.defects
        )

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json (a multimodal one nests it)."""
        return self.config.get("text_config") or self.config


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Read the JSON files and all safetensors headers under `directory`, a plain folder or a hub cache's model folder.

    Raises LabError when there is nothing to audit: no folder, no config.json, or no safetensors (pickled weights are
    not opened).
    """
    directory = _snapshot(Path(directory).expanduser())
    defects: list[Defect] = []
    config = _json(directory / "config.json", defects)
    if config is None:
        raise LabError(f"{directory}: no config.json; name the folder of a checkpoint")
    index = _json(directory / "model.safetensors.index.json", defects) or {}
    weight_map = index.get("weight_map") if isinstance(index.get("weight_map"), dict) else {}
    here = {path.name for path in directory.glob("*.safetensors")}
    shards = sorted(here | ({str(name) for name in weight_map.values()} or _numbered(here)))
    if not shards:
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {pickled[0]} is a pickle and is not opened: convert it to safetensors" if pickled else ""
        raise LabError(f"{directory}: no *.safetensors{hint}")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for info in _shard(directory, shard, defects):
            if info.name in tensors:
                defects.append(Defect("tensor_duplicated", info.name, f"in {tensors[info.name].file.name} and in {shard}"))
            tensors[info.name] = info
    defects.extend(_index_defects(weight_map, tensors, {defect.name for defect in defects}))
    hf_quant = _json(directory / "hf_quant_config.json", defects) or {}
    nested = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    return Checkpoint(directory, config, nested, hf_quant, tensors, tuple(defects))


def _numbered(names: Iterable[str]) -> set[str]:
    """All files of the sets that `names` say they belong to ("model-00002-of-00003.safetensors"), for folders without index."""
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    return {
        f"{match['stem']}-{number:0{len(match['count'])}}-of-{match['count']}.safetensors"
        for match in found
        for number in range(1, int(match["count"]) + 1)
    }


def read_header(path: Path) -> tuple[dict[str, TensorInfo], list[Defect]]:
    """Tensors that a safetensors file declares, and what is wrong with it. Reads the header alone; never raises for content."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > MAX_HEADER_BYTES:
            problem = f"{size} bytes long, but its header claims {length} bytes" if size >= 8 else f"only {size} bytes long"
            return {}, [Defect("shard_truncated", path.name, problem)]
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        infos = [_entry(name, entry, path, 8 + length) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, [Defect("header_malformed", path.name, f"the header is not safetensors JSON: {error}")]
    return {info.name: info for info in infos}, list(_layout_defects(infos, path, size, 8 + length))


def _entry(name: str, entry: Mapping[str, Any], path: Path, origin: int) -> TensorInfo:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)) or start > stop:
        raise ValueError(f"{name}: shape {shape}, offsets {start}..{stop}")
    return TensorInfo(name, str(entry["dtype"]), shape, path, origin + start, origin + stop)


def _layout_defects(infos: list[TensorInfo], path: Path, size: int, origin: int) -> Iterator[Defect]:
    needed = max((info.stop for info in infos), default=origin)
    if needed > size:
        lost = sum(info.stop > size for info in infos)
        yield Defect("shard_truncated", path.name, f"{size} bytes long, its header needs {needed}; {lost} tensors are cut off")
    end = origin
    for info in sorted(infos, key=lambda info: (info.start, info.stop)):
        if not info.is_consistent:
            problem = f"{info.dtype} {list(info.shape)} does not fill its {info.stop - info.start} bytes"
            yield Defect("header_malformed", info.name, problem)
        if info.start < end:
            yield Defect("header_malformed", info.name, f"its bytes overlap another tensor's in {path.name}")
        elif info.start > end:  # from here on as safetensors itself, which refuses such a file
            yield Defect("header_malformed", info.name, f"{info.start - end} bytes before it belong to no tensor of {path.name}")
        end = max(end, info.stop)
    if end < size:
        yield Defect("header_malformed", path.name, f"{size} bytes long, its header covers {end}")


def _shard(directory: Path, shard: str, defects: list[Defect]) -> list[TensorInfo]:
    path = directory / shard
    if Path(shard).name != shard:
        defects.append(Defect("shard_missing", shard, "the index names a file outside this folder; it is not opened"))
        return []
    if not path.is_file():  # also a hub cache's link to a blob that was not downloaded
        defects.append(Defect("shard_missing", shard, "the index, or the number of a file here, names it, and it is not there"))
        return []
    tensors, problems = read_header(path)
    defects.extend(problems)
    return list(tensors.values())


def _index_defects(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo], damaged: set[str]) -> Iterator[Defect]:
    for name, shard in weight_map.items():
        if name not in tensors and shard not in damaged:
            yield Defect("tensor_missing", name, f"the index places it in {shard}, and it is not there")


def _json(path: Path, defects: list[Defect]) -> dict[str, Any] | None:
    """Content of a JSON file; None when absent, {} with a defect when it is no JSON object."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        defects.append(Defect("config_malformed", path.name, f"holds a {type(value).__name__}, not an object"))
    except (OSError, ValueError, RecursionError) as error:
        defects.append(Defect("config_malformed", path.name, f"not JSON: {error}"))
    return {}


def _snapshot(directory: Path) -> Path:
    """`directory`, or the snapshot inside it when it is a hub cache's `models--owner--name`."""
    if not directory.is_dir():
        raise LabError(f"{directory}: no such folder")
    snapshots = directory / "snapshots"
    if not snapshots.is_dir():
        return directory
    main = directory / "refs" / "main"
    if main.is_file() and (snapshots / main.read_text().strip()).is_dir():
        return snapshots / main.read_text().strip()
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if not found:
        raise LabError(f"{snapshots}: no snapshot inside; download the model first")
    return max(found, key=os.path.getmtime)
