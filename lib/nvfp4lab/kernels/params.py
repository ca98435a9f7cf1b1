"""What stage 2 is asked."""

import pydantic


class KernelParams(pydantic.BaseModel):
    """Which kernels on which shapes."""
