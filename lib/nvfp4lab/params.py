"""Every question the lab can be asked, in one typed schema: YAML file -> Params -> notebook -> Params again.

`load(path)` reads a params file. A notebook's first code cell holds literals named like fields here; its second calls
`of_notebook(globals())`, which catches what papermill only warns of: a name that does not exist. One file serves all
notebooks, so a value that another notebook uses is accepted and carried along.
"""

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from nvfp4lab.batch.params import BatchParams
from nvfp4lab.errors import LabError
from nvfp4lab.kernels.compile_params import CompileParams
from nvfp4lab.kernels.params import KernelParams
from nvfp4lab.nvfp4.params import CheckpointParams
from nvfp4lab.server.params import ServerParams
from nvfp4lab.source.params import SourceParams


class ParamsError(LabError):
    """A params file or notebook parameter that cannot be used; nothing has been run."""


class Params(SourceParams, CheckpointParams, KernelParams, CompileParams, ServerParams, BatchParams):
    """All parameters of all notebooks. Fields are described, typed and range-checked in the stages' own classes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


def load(path: Path | str) -> Params:
    """Read and check one YAML params file. Raises ParamsError naming file, key and the nearest valid name."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in sorted(path.parent.glob("*.y*ml"))], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ParamsError(f"{path}: no such params file{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ParamsError(f"{path}: not plain YAML (tags are refused): {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ParamsError(f"{path}: needs `name: value` lines at the top level, found {type(values).__name__}")
    return check(values, where=str(path))


def check(values: Mapping[str, Any], where: str) -> Params:
    """Params of `values`, or a ParamsError that names `where`, the key and the nearest valid name."""
    try:
        return Params.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise ParamsError("\n".join(_explain(where, problem) for problem in error.errors())) from error


def of_notebook(namespace: Mapping[str, Any]) -> Params:
    """Check the parameters that stand in a notebook's namespace and return them typed.

    Call it before anything else is assigned: every public plain value in `namespace` counts as a parameter, so a
    typo in `papermill -p` is an error here. Pass `globals()`. Relative run folders are taken from the lab's root,
    whatever the kernel's working directory: JupyterLab starts kernels in `notebooks/`, papermill where it is called.
    """
    ipython_names = {"In", "Out", "exit", "quit", "open", "get_ipython", "annotations"}
    values = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in ipython_names
        and not isinstance(value, types.ModuleType)
        and not callable(value)
    }
    checked = check(values, where="notebook parameters")
    root = _lab_root()
    return checked.model_copy(update={"run_dir": str(root / checked.run_dir), "runs": [str(root / run) for run in checked.runs]})


def _lab_root() -> Path:
    """The checkout, or the working directory where the library is installed without one."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "notebooks").is_dir() else Path.cwd()


def _explain(where: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), _names_beside(problem["loc"]), n=1, cutoff=0.5)
        return f"{where}: {key}: unknown name" + (f"; did you mean {near[0]!r}?" if near else "")
    field = Params.model_fields.get(key)
    meaning = f" ({key}: {field.description})" if field is not None else ""
    return f"{where}: {key}: {problem['msg']}, got {problem['input']!r}{meaning}"


def _names_beside(location: tuple[Any, ...]) -> list[str]:
    """Field names valid at the place of `location`: walks nested models through lists and mappings."""
    model: Any = Params
    for part in location[:-1]:
        if isinstance(part, str) and part in getattr(model, "model_fields", {}):
            model = _model_inside(model.model_fields[part].annotation)
    return list(getattr(model, "model_fields", {}))


def _model_inside(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    inner = [_model_inside(argument) for argument in getattr(annotation, "__args__", ())]
    return next((model for model in inner if model is not None), None)
