"""What a run is made of."""

from typing import Annotated

import pydantic


class BatchParams(pydantic.BaseModel):
    """Which notebooks are run, and where they write."""

    notebooks: list[Annotated[str, pydantic.StringConstraints(pattern=r"^\d\d_\w+$")]] = pydantic.Field(
        ["00_start_here"], description="notebooks of this run, by file name without suffix"
    )
    run_dir: str = pydantic.Field("outputs/by_hand", min_length=1, description="folder for ledger, logs and artefacts")
