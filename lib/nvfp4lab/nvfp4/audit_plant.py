"""Plant known faults in a copy of a checkpoint: an audit that finds nothing must be shown able to find something.

Faults are written in place into the copied safetensors files, at the bytes that the headers name.
"""

import dataclasses
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4.audit import audit
from nvfp4lab.nvfp4.checkpoint import TensorInfo, open_checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import Module, modules_of


@dataclasses.dataclass(frozen=True)
class Fault:
    """kind: the finding it must give. module, leaf: the tensor it goes into. raw: the bytes written there at `offset`."""

    kind: str
    module: str
    leaf: str
    raw: bytes
    offset: int = 0


def _float(value: float) -> bytes:
    return struct.pack("<f", value)


FAULTS = (
    Fault("global_scale_mismatch", "up_proj", "weight_scale_2", _float(0.125)),
    Fault("input_scale_nonfinite", "down_proj", "input_scale", _float(float("nan"))),
    Fault("input_scale_zero", "down_proj", "input_scale", _float(0.0)),
    Fault("global_scale_zero", "down_proj", "weight_scale_2", _float(0.0)),
    Fault("block_scale_nan", "gate_proj", "weight_scale", b"\x7f", offset=77),
    Fault("block_scale_zero", "gate_proj", "weight_scale", b"\x00", offset=3),
    Fault("block_scale_negative", "down_proj", "weight_scale", b"\xb8", offset=5),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """planted: kind -> tensor. found: kinds that the audit named in that very tensor. others: what it named besides."""

    planted: Mapping[str, str]
    found: frozenset[str]
    others: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything planted was found and nothing else."""
        return len(self.found) == len(self.planted) and not self.others


def trial(directory: Path | str, work: Path, faults: Iterable[Fault] = FAULTS) -> Trial:
    """Copy the checkpoint to `work`, plant each fault in a layer of its own, audit the copy, and remove it.

    Needs as much disk as the checkpoint and as many FP4 layers as faults: meant for fixture models. Raises LabError else.
    """
    source = open_checkpoint(directory).directory
    if work.exists():
        raise LabError(f"{work}: is there already; the planted copy needs a new folder")
    try:
        shutil.copytree(source, work)
        planted = plant(work, faults)
        named = {(finding.kind, finding.tensor) for finding in audit(work).findings}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found = frozenset(kind for kind, tensor in planted.items() if (kind, tensor) in named)
    others = tuple(sorted(f"{kind}: {tensor}" for kind, tensor in named - set(planted.items())))
    return Trial(planted, found, others)


def plant(directory: Path, faults: Iterable[Fault]) -> dict[str, str]:
    """Write the faults into the files under `directory`; kind -> name of the tensor that now has it."""
    checkpoint = open_checkpoint(directory)
    modules = modules_of(checkpoint.tensors, checkpoint.text_config.get("num_hidden_layers"))
    taken: set[str] = set()
    planted = {}
    for fault in faults:
        info = _place(fault, modules.values(), taken)
        if info.file.is_symlink():
            raise LabError(f"{info.file}: is a link, perhaps to the original; nothing was written")
        with info.file.open("r+b") as file:
            file.seek(info.start + fault.offset)
            file.write(fault.raw)
        planted[fault.kind] = info.name
    return planted


def _place(fault: Fault, modules: Iterable[Module], taken: set[str]) -> TensorInfo:
    """The tensor for a fault, in the first layer that holds none yet."""
    for module in modules:
        layer = module.path.rpartition(".")[0]
        if module.is_fp4 and module.leaf == fault.module and fault.leaf in module.tensors and layer not in taken:
            taken.add(layer)
            return module.tensors[fault.leaf]
    raise LabError(f"no FP4 {fault.module} left to plant {fault.kind} in")
