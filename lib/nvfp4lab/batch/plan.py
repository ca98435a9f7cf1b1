"""From params files to pieces: which notebooks run, in which waves, and under which content hash."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nvfp4lab
from nvfp4lab import params, stack
from nvfp4lab.batch import notebooks
from nvfp4lab.batch.piece import Needs, Piece
from nvfp4lab.errors import LabError

NOTEBOOK_ENTRY = "nvfp4lab.batch.notebooks:execute"
READING_GIB = 4.0  # of host memory: more than any notebook took that starts no kernel and no server


@dataclasses.dataclass(frozen=True)
class Plan:
    """waves: pieces by order; every piece of a wave may run at once, after all earlier waves."""

    name: str
    waves: tuple[tuple[Piece, ...], ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in order."""
        return tuple(piece for wave in self.waves for piece in wave)


def of_params(paths: Sequence[Path], only: Sequence[str], run_dir: Path) -> Plan:
    """The plan of all notebooks of all params files. Checks everything before anything runs.

    only: keep notebooks whose name starts with one of these ("10", "31_server"); empty keeps all. Raises ParamsError
    for a bad file, LabError for a notebook that does not exist, a filter that matches nothing, or two files of one name.
    """
    stems = [path.stem for path in paths]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise LabError(f"two params files are called {twice!r}, and pages are named after them; rename one or run them one by one")
    first: list[Piece] = []
    second: list[Piece] = []
    for path in paths:
        values = params.load(path)
        for name in _selected(values.notebooks, only, path):
            about = notebooks.declared(name)
            (second if about.after else first).append(_piece(path.stem, name, about, values, run_dir))
    second = [_depending(piece, first) for piece in second]
    return Plan("+".join(path.stem for path in paths), tuple(tuple(wave) for wave in (first, second) if wave))


def _selected(names: Sequence[str], only: Sequence[str], path: Path) -> list[str]:
    for name in names:
        notebooks.path_of(name)
    chosen = [name for name in names if not only or any(name.startswith(prefix) for prefix in only)]
    if not chosen:
        raise LabError(f"--only {','.join(only)} matches none of the notebooks of {path}: {', '.join(names)}")
    return chosen


def _piece(stem: str, name: str, about: notebooks.Declared, values: params.Params, run_dir: Path) -> Piece:
    given = {key: value for key, value in values.model_dump(mode="json").items() if key in values.model_fields_set}
    wanted: dict[str, Any] = {
        key: value for key, value in given.items() if key in about.parameters and key not in ("run_dir", "runs")
    }
    if "runs" in about.parameters:
        wanted["runs"] = [str(run_dir)]
    return Piece(
        name=f"{name}.{stem}",
        entry=NOTEBOOK_ENTRY,
        arguments={"notebook": name, "parameters": wanted, "cell_timeout_s": values.cell_timeout_s},
        inputs_digest=_digest(notebooks.digest(name), library_digest(), stack_digest()),
        needs=Needs(gpus=_gpus(about, values), memory_gib=_memory_gib(about, values)),
        timeout_s=about.timeout_s,
    )


def _memory_gib(about: notebooks.Declared, values: params.Params) -> float:
    """What the params ask for is for kernels and servers; reading, deciding and drawing must not wait for that much."""
    return values.memory_gib if about.gpus else min(values.memory_gib, READING_GIB)


def _gpus(about: notebooks.Declared, values: params.Params) -> int:
    if about.gpus == "arms":
        return max((arm.gpus() for arm in values.arms), default=0)
    return min(1, len(stack.gpu_names())) if about.gpus == "any" else about.gpus


def _depending(piece: Piece, inputs: Sequence[Piece]) -> Piece:
    """`piece` with the hashes of what it reads in its own: it runs again when one of them changes."""
    return dataclasses.replace(piece, inputs_digest=_digest(piece.inputs_digest, *sorted(other.digest for other in inputs)))


@functools.lru_cache(maxsize=1)
def library_digest() -> str:
    """Hash of every source and data file of the library."""
    root = Path(nvfp4lab.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return _digest(*(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files))


def stack_digest() -> str:
    """Hash of the versions and the GPU here; the lab's commit is left out, since the library is hashed itself."""
    return _digest(json.dumps(dataclasses.asdict(dataclasses.replace(stack.capture(), lab_commit=None)), sort_keys=True))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
