"""What stage 1 is asked."""

from typing import Annotated

import pydantic

from nvfp4lab.source import capability

Version = Annotated[str, pydantic.StringConstraints(pattern=r"^\S+$")]
ComputeCapability = Annotated[
    str,
    pydantic.BeforeValidator(
        lambda value: f"{value:.1f}" if isinstance(value, float) else value
    ),  # YAML and papermill read 12.0 so
    pydantic.StringConstraints(pattern=rf"^(cpu|{capability.PATTERN})$"),
]


class SourceParams(pydantic.BaseModel):
    """Which packages are read and about which GPU, model and layout the question is."""

    sglang: Version = pydantic.Field("0.5.23", description="PyPI version, wheel file, installed folder or checkout")
    flashinfer: Version | None = pydantic.Field(None, description="as sglang; None: the version that SGLang pins")
    sglang_old: Version = pydantic.Field("0.5.9", description="the older side of the version diff")
    flashinfer_old: Version = pydantic.Field("0.6.5", description="the older side of the version diff")
    cc: ComputeCapability = pydantic.Field("12.0", description="compute capability asked about, such as 12.0")
    quant: str = pydantic.Field("modelopt_fp4", description="effective quantisation method of the checkpoint")
    model_arch: str | None = pydantic.Field(None, description="architectures[0] of config.json")
    a2a: str = pydantic.Field("none", description="--moe-a2a-backend")
    tp: int = pydantic.Field(1, ge=1, le=1024, description="tensor parallel size")
    ep: int = pydantic.Field(1, ge=1, le=1024, description="expert parallel size")
    gated: bool = pydantic.Field(True, description="experts are gated (SwiGLU)")
    flag_given: bool = pydantic.Field(False, description="whether --quantization is on the command line")
    witness: bool = pydantic.Field(False, description="also ask the objects of the SGLang installed here (half a minute)")
