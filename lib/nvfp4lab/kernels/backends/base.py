"""What a backend is: a kernel, how its operands are prepared, and why it cannot be tried.

The three steps are apart because they cost differently. `prepare` is done once for a set of weights and is what a server does
at load time; `bind` readies the activations and names the output; what `bind` returns launches the kernel and nothing else,
so that it can be timed and captured.
"""

import importlib.util
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from nvfp4lab.kernels.isolate_outcome import without_folders
from nvfp4lab.kernels.operands import Problem
from nvfp4lab.kernels.reference import Kernel
from nvfp4lab.kernels.shapes import GemmShape, Shape
from nvfp4lab.records import Target

Launch = Callable[[], torch.Tensor]

# Conventions that decide which problem a backend is given, and with which probe its speed is bought.
GLOBAL_SCALES_IN_BF16 = "global scales rounded to bf16 by SGLang's preparation"
SMALL_WEIGHTS_FLUSHED = "weights below 2^-7 of the global scale become zero (bf16 subnormals)"
ROUNDED_BEFORE_SCALING = "the sum is rounded to bf16 before the global scale: results below 2^-7 of it lose bits"
ROUTES_FOR_ITSELF = "routes for itself, by a softmax of bf16 logits: exact probes give it equal router weights"
SPLIT_K_IN_BF16 = (
    "split-K partial sums added in bf16 by atomics where SGLang asks for it (from SM90 on: MoE always, dense where N < 2048 <= K)"
)

# What kernels and their Python front ends say when they refuse by themselves, beside the two exception classes.
_REFUSAL_CLASSES = frozenset({"BackendSupportedError", "NotImplementedError"})
_REFUSAL_WORDS = re.compile(
    r"not (yet )?(support|implement)|unsupport|requires?\b|must (be|have)|needs? to be|divisible|multiple of|invalid thread config"
    r"|no (valid|suitable|supported) |only supports?|does not support|mismatch",
    re.IGNORECASE,
)
# Kernels refuse with ValueError, AssertionError, RuntimeError or classes of their own; these say that the call was wrong.
_CALLERS_MISTAKES = (TypeError, AttributeError, NameError, ImportError, LookupError)
_DEVICE_FAULT = re.compile(r"CUDA error|illegal memory|illegal instruction|misaligned|unspecified launch", re.IGNORECASE)


class Backend(Protocol):
    """One kernel.

    name: "package.function" or "package.function.variant". activations: what it multiplies; a bf16 one is weight-only (W4A16).
    arithmetic: number format of its products, for the roofline ("fp4", "bf16", "fp32").
    conventions: what its preparation does that the problem's exact definition does not; said in each record.
    variants: ways of calling it beside the plain one that make sense ("autotune", "cuda_graph", ...).
    """

    name: str
    op: Literal["gemm", "moe", "quantise"]
    activations: Literal["fp4", "bf16"]
    arithmetic: Literal["fp4", "bf16", "fp32"]
    conventions: tuple[str, ...]
    variants: tuple[str, ...]

    def is_available(self) -> str | None:
        """None, or why it cannot be called at all here (package missing, no GPU)."""

    def can_run(self, target: Target, shape: Shape) -> str | None:
        """None, or why the lab does not try this shape. What the kernel refuses by itself is left to the kernel."""

    def prepare(self, problem: Problem) -> Any:
        """Weights of the problem as the kernel wants them."""

    def bind(self, prepared: Any, problem: Problem, out: torch.Tensor) -> Launch:
        """A call without arguments that runs the kernel once. It writes `out` where the kernel takes an output."""


def adds_in_bf16(backend: Backend, shape: Shape) -> bool:
    """Whether split-K partial sums are added up in bf16 at this shape, by the rule in SPLIT_K_IN_BF16's words."""
    return SPLIT_K_IN_BF16 in backend.conventions and not (isinstance(shape, GemmShape) and (shape.n >= 2048 or shape.k < 2048))


def run(backend: Backend, prepared: Any, problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """Bind and launch once."""
    return backend.bind(prepared, problem, out)()


def kernel_of(backend: Backend) -> Kernel:
    """The backend as a plain function of problem and output; weights are prepared once for each set."""
    prepared: dict[int, tuple[Problem, Any]] = {}

    def kernel(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        key = weights_key(problem)
        if key not in prepared:
            prepared[key] = (problem, backend.prepare(problem))  # the problem is kept so that its ids stay taken
        return run(backend, prepared[key][1], problem, out)

    return kernel


def weights_key(problem: Problem) -> int:
    """Equal for problems that share all their weight tensors."""
    parts = [getattr(problem, name) for name in ("weights", "gate", "up", "down") if hasattr(problem, name)]
    return hash(tuple(id(tensor) for part in parts for tensor in (part.codes, part.block_scale, part.global_scale)))


def needs_gpu(*packages: str) -> str | None:
    """None, or which package or device is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed here"
    return None if torch.cuda.is_available() else "no CUDA GPU here"


def refusal(error: BaseException) -> str | None:
    """The kernel's own words if `error` is its refusal, None if it is a crash."""
    text = without_folders(f"{type(error).__name__}: {' '.join(str(error).split())}")[:600]
    names = {base.__name__ for base in type(error).__mro__}
    if names & _REFUSAL_CLASSES:
        return text
    stated = not isinstance(error, _CALLERS_MISTAKES) and _REFUSAL_WORDS.search(str(error))
    return text if stated and not _DEVICE_FAULT.search(str(error)) else None
