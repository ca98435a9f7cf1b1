"""Where the notebooks are, what each one declares about itself, and the piece that executes one.

A notebook's own metadata says what it needs:
`metadata.nvfp4lab = {"after": [...], "gpus": 0, "timeout_s": 600, "resumes": false}`.

- `after` names notebooks whose evidence it reads; ["*"] means every other one of the run.
- `gpus` may be "arms": as many as the largest arm of the params asks for, or "any": one where this host has one.
- `resumes`: it skips what its run folder already holds.
"""

import ast
import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nvfp4lab.batch.piece import RESULT_FILE
from nvfp4lab.errors import LabError
from nvfp4lab.records import Ledger, Verdict

KILLED_FROM_OUTSIDE = "was killed by SIGKILL"  # no process does that to itself by mistake: the piece did not fail, it was stopped
MEASURED_FOLDERS = ("answers", "load")
NOTEBOOK_FILE, REPORT_FILE, LEDGER_FILE = "notebook.ipynb", "report.html", "ledger.jsonl"


def lab_root() -> Path:
    """The checkout: the folder that holds `notebooks/`. Raises LabError when there is none."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "notebooks").is_dir():
            return root
    raise LabError("no notebooks/ folder beside the library or here: run from a checkout of the lab", exit_code=3)


def all_names() -> list[str]:
    """Names of all notebooks, in reading order."""
    return sorted(path.stem for path in (lab_root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def path_of(name: str) -> Path:
    """Path of a notebook, or a LabError with the nearest name."""
    path = lab_root() / "notebooks" / f"{name}.ipynb"
    if not path.exists():
        near = difflib.get_close_matches(name, all_names(), n=1, cutoff=0.3)
        raise LabError(f"no notebook {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; there are {all_names()}"))
    return path


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a notebook says of itself. parameters: the names its `parameters` cell assigns."""

    after: tuple[str, ...]
    gpus: int | Literal["arms", "any"]
    timeout_s: float
    resumes: bool
    parameters: frozenset[str]


def declared(name: str) -> Declared:
    """Read a notebook's declaration. Raises LabError when it has no cell tagged `parameters`."""
    notebook = json.loads(path_of(name).read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if "parameters" in cell.get("metadata", {}).get("tags", ())]
    if not cells:
        raise LabError(f"notebooks/{name}.ipynb has no cell tagged `parameters`")
    tree = ast.parse("".join(cells[0]["source"]))
    assigned = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    own = notebook["metadata"].get("nvfp4lab", {})
    return Declared(
        after=tuple(own.get("after", ())),
        gpus=own.get("gpus", 0),
        timeout_s=own.get("timeout_s", 1800),
        resumes=own.get("resumes", False),
        parameters=frozenset(target.id for targets in assigned for target in targets if isinstance(target, ast.Name)),
    )


def digest(name: str) -> str:
    """Hash of a notebook's file."""
    return hashlib.sha256(path_of(name).read_bytes()).hexdigest()


def execute(arguments: Mapping[str, Any], attempt: Path) -> tuple[Verdict, str]:
    """Piece entry: run one notebook in `attempt` and render its page.

    arguments: `notebook` (name), `parameters` (dict passed to papermill), `cell_timeout_s` (int or None).
    Writes notebook.ipynb, report.html, ledger.jsonl and log.txt there. The verdict is the notebook's own. What an earlier
    attempt had run to its end, and was killed before it could publish, is taken over and not run again.
    """
    from nvfp4lab.batch import cleanup  # here: seconds of imports that planning does not need
    from nvfp4lab.report import page

    executed = attempt / NOTEBOOK_FILE
    earlier = _unpublished(attempt)
    finished = next((path for path in earlier if _outcome(path / NOTEBOOK_FILE).get("verdict") == Verdict.OK), None)
    if finished is not None:
        finished.rename(attempt)  # in place of the empty folder
    elif declared(arguments["notebook"]).resumes:
        _carry_over(earlier, attempt)
    try:
        if finished is None:
            _run(arguments, attempt)
    except RuntimeError as error:  # jupyter_client's word for a kernel that died while it started
        return Verdict.NOT_RUN, f"the notebook's kernel did not start: {error}"
    finally:
        cleanup.end_servers_of(attempt)
    outcome = _outcome(executed)
    page.render(executed, attempt / REPORT_FILE, list(Ledger(attempt / LEDGER_FILE)))
    if KILLED_FROM_OUTSIDE in outcome["reason"]:
        return (
            Verdict.NOT_RUN,
            f"{outcome['reason']} from outside (an operator, or the system short of memory); --resume runs it again",
        )
    return Verdict(outcome["verdict"]), outcome["reason"]


def _run(arguments: Mapping[str, Any], attempt: Path) -> None:
    """Execute the notebook through papermill; how it ended stands in the executed notebook's metadata."""
    import papermill  # here: seconds of imports that planning does not need

    # Its parser overlooks annotations such as `str | None` and calls such parameters unknown; the plan has checked them all.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    with (attempt / "log.txt").open("w", encoding="utf-8") as log, contextlib.suppress(papermill.PapermillExecutionError):
        papermill.execute_notebook(
            path_of(arguments["notebook"]),
            attempt / NOTEBOOK_FILE,
            parameters=dict(arguments["parameters"]) | {"run_dir": str(attempt)},
            engine_name="nvfp4lab",
            execution_timeout=arguments.get("cell_timeout_s"),
            progress_bar=False,
            stdout_file=log,
            stderr_file=log,
            cwd=lab_root(),
            kernel_name=None,
        )


def _outcome(executed: Path) -> dict[str, Any]:
    """What our engine recorded of an executed notebook; {} when it did not come to its end."""
    if not executed.exists():
        return {}
    return json.loads(executed.read_text(encoding="utf-8"))["metadata"].get("nvfp4lab_run", {})


def _unpublished(attempt: Path) -> list[Path]:
    """Folders of earlier attempts at the same piece that never published."""
    digest = attempt.name.split(".")[0]
    return [path for path in attempt.parent.glob(f"{digest}.*") if path != attempt and not (path / RESULT_FILE).exists()]


def _carry_over(earlier: Sequence[Path], attempt: Path) -> None:
    """Copy what the last of the earlier attempts had measured, for a notebook that goes on from there."""
    measured = [path for path in earlier if (path / LEDGER_FILE).exists()]
    if not measured:
        return
    latest = max(measured, key=lambda path: (path / LEDGER_FILE).stat().st_mtime)
    shutil.copy2(latest / LEDGER_FILE, attempt / LEDGER_FILE)
    for name in MEASURED_FOLDERS:
        if (latest / name).is_dir():
            shutil.copytree(latest / name, attempt / name)
