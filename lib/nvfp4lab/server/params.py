"""What stage 3 is asked."""

import pydantic


class ServerParams(pydantic.BaseModel):
    """Which arms, prompts and loads."""
