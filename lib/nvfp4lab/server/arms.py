"""An arm: one server configuration, and what it becomes on SGLang's command line.

An arm says only what is asked. Where a field is None or "auto" the flag is left out, so that SGLang decides, and the
log (not this file) says what it decided.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from nvfp4lab.server import processes_gpu

Flag = Annotated[str, pydantic.StringConstraints(pattern=r"^\S.*$")]
Size = Annotated[int, pydantic.Field(ge=1, le=1024)]
Flags = Annotated[tuple[Flag, ...], pydantic.Strict(False)]  # YAML has lists only

# Flags that may not hide among the further ones: routes, the count of GPUs and the wait for the port go by the fields.
_FIELD_OF: Mapping[str, str] = {
    **{
        f"--{name.replace('_', '-')}": name
        for name in ("quantization", "fp4_gemm_backend", "moe_runner_backend", "moe_a2a_backend")
    },
    **{"--attention-backend": "attention_backend", "--device": "device", "--model": "model", "--model-path": "model"},
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "tp"),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), "ep"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), "dp"),
    **dict.fromkeys(("--speculative-algo", "--speculative-algorithm"), "speculation"),
}
_CHOSEN_BY_THE_LAB = ("--host", "--port")

STAND_IN = Path(__file__).with_name("sgl_kernel_stand_in")

# A server on a host without CUDA. Radix cache off: with another torch than SGLang pins it fails, and canaries must not be
# answered from a cache. No graphs: there are none on a CPU. The pool is small because it is allocated at once.
CPU_FLAGS: Mapping[str, str | None] = {
    "--device": "cpu",
    "--disable-cuda-graph": None,
    "--disable-radix-cache": None,
    "--max-total-tokens": "4096",
    "--mem-fraction-static": "0.3",
}


class Speculation(pydantic.BaseModel):
    """Speculative decoding as SGLang names it; NEXTN uses the checkpoint's own MTP layer."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    algorithm: Literal["NEXTN", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"] = "NEXTN"
    num_steps: int = pydantic.Field(3, ge=1, le=16)
    eagle_topk: int = pydantic.Field(1, ge=1, le=64)
    num_draft_tokens: int = pydantic.Field(4, ge=1, le=128)
    draft_model: str | None = None

    @property
    def uses_mtp_layer(self) -> bool:
        """Whether it drafts with the checkpoint's own layer, and so is nothing without one."""
        return self.algorithm == "NEXTN" and self.draft_model is None

    def flags(self) -> list[str]:
        """Command line of this speculation."""
        flags = ["--speculative-algorithm", self.algorithm, "--speculative-num-steps", str(self.num_steps)]
        flags += ["--speculative-eagle-topk", str(self.eagle_topk), "--speculative-num-draft-tokens", str(self.num_draft_tokens)]
        return flags + (["--speculative-draft-model-path", self.draft_model] if self.draft_model else [])


class Arm(pydantic.BaseModel):
    """One server configuration. Field names are SGLang's flags; None: the flag is not given."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = pydantic.Field(pattern=r"^[\w.+-]{1,80}$", description="names logs and records, so: letters, digits, . _ + -")
    model: str = pydantic.Field(min_length=1, description="checkpoint folder or fixture model")
    quantization: Flag | None = pydantic.Field(None, description="--quantization; None: SGLang reads it from the checkpoint")
    fp4_gemm_backend: Flag | None = None
    moe_runner_backend: Flag | None = None
    moe_a2a_backend: Flag | None = None
    attention_backend: Flag | None = None
    tp: Size = 1
    ep: Size = 1
    dp: Size = 1
    speculation: Speculation | None = None
    flags: Flags = pydantic.Field((), description='further flags, one word each: ["--max-total-tokens", "4096"]')
    env: dict[str, str] = pydantic.Field({}, description="environment variables on top of the lab's own")
    device: Literal["auto", "cuda", "cpu"] = "auto"

    @pydantic.field_validator("flags")
    @classmethod
    def _flags_are_words_and_have_no_field(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        for word in flags:
            if word.startswith("--") and (" " in word or "=" in word):
                flag, value = word.replace("=", " ", 1).split(" ", 1)
                raise ValueError(f"{word!r} is not one word; write {flag!r}, {value.strip()!r}")
            if word in _FIELD_OF:
                raise ValueError(f"{word} has a field of its own: {_FIELD_OF[word]}")
            if word in _CHOSEN_BY_THE_LAB:
                raise ValueError(f"{word} is chosen by the lab, which waits for the server there")
        return flags

    @pydantic.model_validator(mode="after")
    def _sizes_fit(self) -> "Arm":
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} must divide tp {self.tp}: SGLang spreads the experts over the tensor-parallel ranks")
        return self

    def on_cpu(self) -> bool:
        """Whether it runs without CUDA: asked for, or nothing else is here."""
        return self.device == "cpu" or (self.device == "auto" and not processes_gpu.used_mib())

    def rounds_activations(self, cc: str) -> bool:
        """Whether its FP4 kernels round activations to FP4 too (W4A4), as native ones do from SM100 on; Marlin is W4A16."""
        native = cc != "cpu" and float(cc) >= 10.0 and not self.on_cpu()
        return native and not any((name or "").endswith("marlin") for name in (self.fp4_gemm_backend, self.moe_runner_backend))

    def gpus(self) -> int:
        """How many GPUs it needs (plain data parallelism multiplies, attention DP lives inside tp)."""
        return 0 if self.on_cpu() else self.tp * (1 if "--enable-dp-attention" in self.flags else self.dp)

    def backend_flags(self) -> list[str]:
        """The flags that this arm differs by, as on the command line."""
        values = {
            "--quantization": self.quantization,
            "--fp4-gemm-backend": self.fp4_gemm_backend,
            "--moe-runner-backend": self.moe_runner_backend,
            "--moe-a2a-backend": self.moe_a2a_backend,
            "--attention-backend": self.attention_backend,
            "--tp-size": str(self.tp) if self.tp > 1 else None,
            "--ep-size": str(self.ep) if self.ep > 1 else None,
            "--dp-size": str(self.dp) if self.dp > 1 else None,
        }
        given = [word for flag, value in values.items() if value is not None for word in (flag, value)]
        return given + (self.speculation.flags() if self.speculation else []) + list(self.flags)

    def command(self, model_folder: Path | str, port: int, nccl_port: int | None = None) -> list[str]:
        """The whole command line, on 127.0.0.1, served by the interpreter that runs the lab.

        nccl_port: where the ranks meet. Left to itself SGLang chooses an ephemeral port long before it listens there, and
        on a busy host somebody else has it by then.
        """
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_folder)]
        words += ["--host", "127.0.0.1", "--port", str(port), *self.backend_flags()]
        if nccl_port is not None and "--nccl-port" not in words:
            words += ["--nccl-port", str(nccl_port)]
        if self.on_cpu():
            missing = {flag: value for flag, value in CPU_FLAGS.items() if flag not in words}
            words += [word for pair in missing.items() for word in pair if word is not None]
        return words

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """`environment_here` with what this arm needs and asks for."""
        engine = {"SGLANG_USE_CPU_ENGINE": "1"} if self.on_cpu() else {}
        return environment_here(base) | engine | self.env


def environment_here(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`base`, and on a host without CUDA the stand-in for `sgl_kernel`: an environment in which SGLang can be imported."""
    if processes_gpu.used_mib():
        return dict(base)
    return {**base, "PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_IN), base.get("PYTHONPATH"))))}


def grid(base: Arm, **axes: Sequence[Any]) -> list[Arm]:
    """`base` at every combination of the values given per field; the names say which.

    >>> [arm.name for arm in grid(Arm(name="x", model="m"), fp4_gemm_backend=["marlin", "auto"])]
    ['x+marlin', 'x+auto']
    """
    combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    fields = base.model_dump()
    return [
        Arm.model_validate(fields | chosen | {"name": "+".join([base.name, *(_word(*item) for item in chosen.items())])})
        for chosen in combinations
    ]


def _word(field: str, value: Any) -> str:
    if value is None:
        return f"no-{field}"
    with contextlib.suppress(AttributeError):
        return str(value.algorithm)
    return str(value) if isinstance(value, str) else f"{field}{value}"
