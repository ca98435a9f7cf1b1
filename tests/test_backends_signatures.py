"""FlashInfer backends call functions that exist, with arguments that bind: each stand-in has the real function's signature.

The signatures are read from FlashInfer's own wheel without importing it, so a rename upstream fails here and not on a GPU.
"""

import ast
import enum
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable

import pytest
import torch

from nvfp4lab.kernels import backends
from nvfp4lab.kernels.probes_exact import exact_gemm
from nvfp4lab.kernels.probes_moe import exact_moe
from nvfp4lab.kernels.probes_quantise import quantise_codes
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, QuantiseShape
from nvfp4lab.nvfp4.layouts import LINEAR, SWIZZLED_8X4, SWIZZLED_128X4
from nvfp4lab.source import package

pytestmark = pytest.mark.wheel
VERSION = "0.6.15.post1"
PROBLEMS = {
    "gemm": exact_gemm(GemmShape(9, 64, 128), 0, 24).problem,
    "moe": exact_moe(MoeShape(9, 64, 64, 4, 2), 0).problem,
    "quantise": quantise_codes(QuantiseShape(9, 128), 0).problem,
}


class SfLayout(enum.IntEnum):
    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def signature(tree, member: str, function: str) -> inspect.Signature:
    """Of a function in a wheel, from its source: names, kinds and which have defaults."""
    nodes = ast.walk(ast.parse(tree.read(f"flashinfer/{member}")))
    arguments = next(node.args for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function)
    kind = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = len(positional) - len(arguments.defaults)
    found = [
        kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if index < optional else None)
        for index, one in enumerate(positional)
    ]
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if arguments.kwarg:
        found.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


def quantised(given) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = given["a"].shape
    layout = {0: SWIZZLED_128X4, 1: SWIZZLED_8X4, 2: LINEAR}[int(given["sfLayout"])]
    return torch.zeros(rows, columns // 2, dtype=torch.uint8), torch.zeros(
        layout.padded_shape(rows, columns // 16), dtype=torch.uint8
    )


def quantised_by_flags(given) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised({"a": given["input"], "sfLayout": 0 if given["is_sf_swizzled_layout"] else 2})


def moe_out(given) -> torch.Tensor:
    return torch.zeros(9, 64)


FUNCTIONS: tuple[tuple[str, str, str, Callable], ...] = (
    ("flashinfer", "gemm/gemm_base.py", "mm_fp4", lambda given: given["out"]),
    ("flashinfer", "gemm/gemm_bf16_fp4.py", "mm_bf16_fp4", lambda given: given["out"]),
    (
        "flashinfer",
        "gemm/gemm_bf16_fp4.py",
        "prepare_bf16_fp4_weights",
        lambda given: (given["b"], given["b_descale"], given["alpha"]),
    ),
    ("flashinfer", "quantization/fp4_quantization.py", "nvfp4_quantize", quantised),
    ("flashinfer", "quantization/fp4_quantization.py", "fp4_quantize", quantised_by_flags),
    ("flashinfer", "fused_moe/cute_dsl/fused_moe.py", "cute_dsl_fused_moe_nvfp4", moe_out),
    ("flashinfer", "fused_moe/cute_dsl/b12x_moe.py", "b12x_fused_moe", moe_out),
    ("flashinfer.fused_moe", "fused_moe/core.py", "cutlass_fused_moe", moe_out),
    ("flashinfer.cute_dsl.utils", "cute_dsl/utils.py", "convert_sf_to_mma_layout", lambda given: given["sf"]),
)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Stand-ins in sys.modules; the list names each one that was called with arguments that bind."""
    tree, made = package.resolve(VERSION, "flashinfer").tree, []

    def stand_in(member: str, function: str, result: Callable) -> Callable:
        bound = signature(tree, member, function).bind

        def call(*args, **kwargs):
            given = bound(*args, **kwargs).arguments
            made.append(function)
            return result(given)

        return call

    modules = {
        name: types.ModuleType(name)
        for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.cute_dsl", "flashinfer.cute_dsl.utils")
    }
    for module, member, function, result in FUNCTIONS:
        exported = tree.read(
            f"{module.replace('.', '/')}/__init__.py" if module != "flashinfer.cute_dsl.utils" else "flashinfer/cute_dsl/utils.py"
        )
        assert function.encode() in exported, f"{module} does not export {function}"
        setattr(modules[module], function, stand_in(member, function, result))
    modules["flashinfer"].__path__ = []
    modules["flashinfer"].__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    modules["flashinfer"].SfLayout = SfLayout
    modules["flashinfer"].shuffle_matrix_a = lambda matrix, tile: matrix
    modules["flashinfer"].shuffle_matrix_sf_a = lambda scale, tile: torch.zeros(
        SWIZZLED_128X4.padded_shape(*scale.shape), dtype=torch.uint8
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("name", [name for name in backends.every() if name.startswith("flashinfer.") and "trtllm_fp4" not in name])
def test_arguments_bind(name, calls):
    if name in ("flashinfer.grouped_gemm_nt_masked", "flashinfer.cute_dsl_fused_moe_nvfp4"):
        pytest.importorskip("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl", exc_type=Exception)
    if name == "flashinfer.grouped_gemm_nt_masked":
        pytest.skip("goes through SGLang's masked MoE, whose own imports need FlashInfer itself")
    backend = backends.find(name)
    problem = PROBLEMS[backend.op]
    out = torch.zeros(problem.out_shape, dtype=problem.out_dtype)
    backend.bind(backend.prepare(problem), problem, out)()
    assert calls[-1] == name.split(".")[1]
