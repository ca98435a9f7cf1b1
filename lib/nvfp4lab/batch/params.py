"""What a run is made of."""

from pathlib import PurePath
from typing import Annotated

import pydantic

NotebookName = Annotated[str, pydantic.StringConstraints(pattern=r"^\d\d_\w+$")]


def _inside(value: str) -> str:
    """A folder that a params file names stays where it says: no `..` on the way."""
    if ".." in PurePath(value).parts:
        raise ValueError("a folder may not contain `..`")
    return value


Folder = Annotated[str, pydantic.StringConstraints(min_length=1), pydantic.AfterValidator(_inside)]


class BatchParams(pydantic.BaseModel):
    """Which notebooks are run, under which limits, and where they write."""

    notebooks: list[NotebookName] = pydantic.Field(
        ["00_start_here"], min_length=1, description="notebooks of this run, by file name without suffix"
    )
    run_dir: Folder = pydantic.Field("outputs/by_hand", description="folder for ledger, logs and artefacts")
    runs: list[Folder] = pydantic.Field(["outputs/by_hand"], min_length=1, description="run folders whose evidence is joined")
    cell_timeout_s: int | None = pydantic.Field(900, ge=1, le=86400, description="limit of one notebook cell")
    memory_gib: float = pydantic.Field(
        4.0, gt=0, le=4096, description="host memory that a notebook of kernels or servers is planned with; others need 4 at most"
    )
