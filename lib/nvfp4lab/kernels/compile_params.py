"""What the compile stage is asked."""

from typing import Annotated

import pydantic

Arch = Annotated[str, pydantic.StringConstraints(pattern=r"^\d{2,3}[af]?$")]


class CompileParams(pydantic.BaseModel):
    """Which kernels are built for which GPUs that are not here."""

    compile_archs: list[Arch] = pydantic.Field(
        ["90a", "100a", "103a", "120a", "121a"], min_length=1, description="architectures as nvcc names them, without sm_"
    )
    compile_modules: list[str] = pydantic.Field(
        [], description="modules to build, see `nvfp4lab compile --list`; none: those that build in seconds"
    )
    compile_all_units: bool = pydantic.Field(False, description="build every file of a module, not only its representative one")
    compile_timeout_s: float = pydantic.Field(1800.0, gt=0, le=86400, description="limit of one nvcc call")
    compile_memory_gib: float = pydantic.Field(14.0, gt=0, description="memory that all nvcc calls together may use")
