"""A miniature SGLang for tests: the constructs of the real one in a few lines each, and trees with changed members."""

from pathlib import Path

FP4_UTILS = """
from enum import Enum
from sglang.srt.utils.common import get_device_capability, is_cuda, is_sm100_supported

class Fp4GemmRunnerBackend(Enum):
    AUTO = "auto"
    FLASHINFER_CUDNN = "flashinfer_cudnn"
    FLASHINFER_CUTEDSL = "flashinfer_cutedsl"
    MARLIN = "marlin"

    def is_auto(self):
        return self == Fp4GemmRunnerBackend.AUTO

    def is_flashinfer(self):
        return self.value.startswith("flashinfer_")

    def is_weight_only(self):
        return self in (Fp4GemmRunnerBackend.MARLIN,)

    def is_mystery(self):
        return ask_the_driver(self)

    def get_flashinfer_backend(self):
        if self == Fp4GemmRunnerBackend.FLASHINFER_CUTEDSL:
            return "cute-dsl"
        return self.value.removeprefix("flashinfer_")

CHOSEN = None

def initialize_fp4_gemm_config(server_args):
    global CHOSEN
    backend = server_args.fp4_gemm_runner_backend
    if backend == "auto":
        if is_sm100_supported():
            backend = "flashinfer_cutedsl"
        elif is_cuda() and (10, 0) > get_device_capability() >= (8, 0):
            backend = "marlin"
        else:
            backend = "flashinfer_cudnn"
    CHOSEN = Fp4GemmRunnerBackend(backend)
"""

COMMON = """
from functools import lru_cache, partial

def _check(device_capability_majors, cuda_version):
    raise RuntimeError("must not run")

is_blackwell_supported = is_blackwell = lru_cache(maxsize=1)(
    partial(_check, device_capability_majors=[10, 11, 12], cuda_version=(12, 8))
)
is_sm100_supported = lru_cache(maxsize=1)(
    partial(_check, device_capability_majors=[10], cuda_version=(12, 8))
)
"""

SERVER_ARGS = """
import dataclasses
from sglang.srt.utils.common import is_blackwell_supported

FP4_GEMM_RUNNER_BACKEND_CHOICES = ["auto", "flashinfer_cudnn", "marlin"]

@dataclasses.dataclass
class ServerArgs:
    fp4_gemm_runner_backend: str = "auto"
    moe_runner_backend: str = "auto"

    def _handle_moe_kernel_config(self):
        if self.moe_runner_backend == "flashinfer_cutlass":
            assert self.quantization in ["modelopt_fp4", None], "no"
        if self.quantization == "modelopt_fp4" and is_blackwell_supported():
            if self.moe_runner_backend == "auto" and self.moe_a2a_backend == "none":
                self.moe_runner_backend = "flashinfer_cutlass"

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--fp4-gemm-backend", dest="fp4_gemm_runner_backend", choices=FP4_GEMM_RUNNER_BACKEND_CHOICES)
"""

MOE_UTILS = """
from enum import Enum

class _Predicates:
    def is_flashinfer_cutlass(self):
        return self.value == MoeRunnerBackend.FLASHINFER_CUTLASS.value

    def is_marlin(self):
        return self.value in (MoeRunnerBackend.MARLIN.value, MoeRunnerBackend.OTHER_MARLIN.value)

class MoeRunnerBackend(_Predicates, Enum):
    AUTO = "auto"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    MARLIN = "marlin"
    OTHER_MARLIN = "other_marlin"

class MoeA2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"
"""

MEMBERS = {
    "sglang/__init__.py": "",
    "sglang/version.py": '__version__ = "0.0.test"\n',
    "sglang/srt/__init__.py": "",
    "sglang/srt/layers/quantization/fp4_utils.py": FP4_UTILS,
    "sglang/srt/layers/moe/utils.py": MOE_UTILS,
    "sglang/srt/utils/common.py": COMMON,
    "sglang/srt/server_args.py": SERVER_ARGS,
}


def write(root: Path, members: dict[str, str] | None = None) -> Path:
    """Write the miniature package (or `members`) below `root` and return it."""
    for name, text in (MEMBERS if members is None else members).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


class Overlay:
    """A tree whose named members say something else: what a reader derives from them must follow."""

    def __init__(self, tree, changes: dict[str, bytes]):
        self.origin = f"{tree.origin} with {len(changes)} members changed"
        self._tree, self._changes = tree, changes

    def names(self):
        return tuple(sorted({*self._tree.names(), *self._changes}))

    def __contains__(self, name):
        return name in self._changes or name in self._tree

    def read(self, name):
        return self._changes[name] if name in self._changes else self._tree.read(name)

    def digest(self):
        return "not cached"
