"""What stage 3 is asked."""

from typing import Annotated

import pydantic

from nvfp4lab.server.arms import Arm

Tokens = Annotated[int, pydantic.Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, pydantic.Field(gt=0, le=86_400)]
Milliseconds = Annotated[float, pydantic.Field(gt=0, le=3_600_000)]


class LoadShape(pydantic.BaseModel):
    """One cell of the load table: prompt and answer length in tokens."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    input_tokens: Tokens
    output_tokens: Tokens


class Slo(pydantic.BaseModel):
    """What a request must meet to count as good; None: no demand."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class ServerParams(pydantic.BaseModel):
    """Which arms are served, how patiently, and under which load."""

    arms: list[Arm] = pydantic.Field(
        [Arm(name="bf16", model="smol-bf16"), Arm(name="nvfp4-dequantised", model="smol-nvfp4-dequantised")],
        min_length=1,
        description="server configurations; the first is the one others are compared with",
    )
    start_on_request: list[str] = pydantic.Field([], description="arms to start although stage 1 proves that they raise")
    servers_at_once: int = pydantic.Field(
        1, ge=1, le=64, description="servers started side by side; they share the GPUs, so 1 for a model that fills them"
    )
    start_idle_s: Seconds = pydantic.Field(180.0, description="a start without any progress for so long is hung")
    start_spinning_s: Seconds = pydantic.Field(1800.0, description="a start with nothing but CPU time for so long is hung")
    reference_model: str | None = pydantic.Field(None, description="bf16 checkpoint that arms are held to; fixtures know theirs")
    ideal_model: str | None = pydantic.Field(None, description="dequantised weights: what perfect NVFP4 kernels would compute with")
    quality_prompts_per_category: int | None = pydantic.Field(1, ge=1, description="prompts of each kind; None: the whole set")
    quality_answer_tokens: int = pydantic.Field(4, ge=2, le=512, description="tokens of the reference's answer that are compared")
    quality_context_tokens: int | None = pydantic.Field(256, ge=64, description="longest prompt; None: the model's window")
    quality_concurrency: int = pydantic.Field(4, ge=1, le=4096, description="at which everything is asked once more")
    canary_tokens: int = pydantic.Field(4, ge=1, le=4096, description="tokens asked of each canary prompt")
    concurrencies: list[Annotated[int, pydantic.Field(ge=1, le=4096)]] = pydantic.Field(
        [1, 4], min_length=1, description="requests in flight at a time"
    )
    load_shapes: list[LoadShape] = pydantic.Field(
        [LoadShape(input_tokens=24, output_tokens=8)], min_length=1, description="prompt and answer lengths of the load"
    )
    prompts_per_slot: int = pydantic.Field(2, ge=1, le=1000, description="requests a load row sends per request in flight")
    restarts: int = pydantic.Field(1, ge=1, le=50, description="times each arm is started anew, interleaved with the others")
    slo: Slo = pydantic.Field(Slo(ttft_ms=2000.0, tpot_ms=500.0), description="service levels for goodput")
    profile_decode: bool = pydantic.Field(True, description="trace one decode step of each arm and compare with route and log")

    @pydantic.field_validator("arms")
    @classmethod
    def _names_differ(cls, arms: list[Arm]) -> list[Arm]:
        names = [arm.name for arm in arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"arm names must differ, but these occur twice: {', '.join(twice)}")
        return arms
