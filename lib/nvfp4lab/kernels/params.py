"""What stage 2 is asked."""

from typing import Literal

import pydantic

Variant = Literal["tactics", "autotune", "off_bucket", "cuda_graph", "streams"]


class KernelParams(pydantic.BaseModel):
    """Which kernels on which shapes, and how hard the gate itself is tested."""

    gate_seeds: int = pydantic.Field(20, ge=1, le=10000, description="seeds for the gate's false-alarm count")
    kernel_backends: list[str] = pydantic.Field([], description="backends by name; empty: every one the lab knows")
    kernel_probes: list[str] = pydantic.Field([], description="probes by name; empty: those that fit each backend")
    kernel_seeds: int = pydantic.Field(1, ge=1, le=1000, description="seeds of each probe")
    kernel_models: list[str] = pydantic.Field(
        ["tiny"], description="model shapes by name (see case_models), or paths of config.json files"
    )
    kernel_tokens: list[int] = pydantic.Field([1, 129], min_length=1, description="rows M of each kernel call")
    kernel_tp: list[int] = pydantic.Field([1], min_length=1, description="tensor-parallel sizes that shapes are split for")
    kernel_ep: list[int] = pydantic.Field([1], min_length=1, description="expert-parallel sizes that experts are split for")
    kernel_variants: list[Variant] = pydantic.Field(
        [], description="ways of calling beside the plain one, where a backend has them"
    )
    kernel_field_reports: bool = pydantic.Field(True, description="replay the kernel bugs of the field reports as named cases")
    kernel_timed: bool = pydantic.Field(False, description="measure speed of the cases whose gate passed")
    kernel_timeout_s: float = pydantic.Field(180.0, gt=0, le=7200, description="limit of one case, compiling apart")
    kernel_memory_gib: float = pydantic.Field(16.0, gt=0, le=4096, description="host memory of one case")
    kernel_workers: int = pydantic.Field(
        2, ge=1, le=256, description="cases at a time on a machine without a GPU; with one always 1"
    )
