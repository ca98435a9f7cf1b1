"""What is asked about checkpoints and the number format."""

import pydantic


class CheckpointParams(pydantic.BaseModel):
    """Which checkpoint is audited, and for how many ranks."""

    tp_size: int | None = pydantic.Field(
        None, ge=1, le=1024, description="also audit every rank's part under this tensor parallelism"
    )
    ep_size: int | None = pydantic.Field(None, ge=1, le=1024, description="the same for expert parallelism")
    model: str = pydantic.Field("smol-bf16", min_length=1, description="checkpoint folder, or the name of a fixture model")
