"""What is asked about checkpoints and the number format."""

import pydantic


class CheckpointParams(pydantic.BaseModel):
    """Which model."""

    model: str = pydantic.Field("smol-bf16", min_length=1, description="checkpoint folder, or the name of a fixture model")
