"""What can be built: modules of FlashInfer and SGLang from their own sources, and three one-instruction probes of ours.

A module is a list of units, each one CUDA file. FlashInfer's instances come from its own templates and from the lists in
its own `jit/gemm/core.py`, so another version builds what that version would build.
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2

from nvfp4lab.errors import LabError

SHARED_PREFIX = "nvfp4lab_shared_bytes_"
_PROBES = Path(__file__).with_name("probe_sources")


@dataclasses.dataclass(frozen=True)
class Unit:
    """One CUDA file.

    text: its source. kernel: regular expression for the last part of the names of the kernels that matter in it: a header may
    bring others along, and Marlin has an empty `MarlinDefault` whose address alone is used, for "there is none".
    shared_bytes: label -> C++ constant expression of the dynamic shared memory that a kernel of it requests. Each becomes
    an array of that size whose symbol is then read from the cubin: the host code that would tell never runs.
    multiplies: whether its kernels are matrix products, which without a tensor-core instruction do nothing useful.
    """

    name: str
    text: str
    kernel: str
    shared_bytes: tuple[tuple[str, str], ...] = ()
    multiplies: bool = True

    @property
    def source(self) -> str:
        """What nvcc is given."""
        arrays = [f'extern "C" __device__ char {SHARED_PREFIX}{label}[{size}];' for label, size in self.shared_bytes]
        return "\n".join([self.text, *arrays, ""])


@dataclasses.dataclass(frozen=True)
class Module:
    """One thing that can be built.

    package: "flashinfer", "sglang" or "lab". units: from the folder that holds the package; the first is representative.
    include_dirs: below that folder. majors: compute capability majors for which the package builds it; None: any.
    peak_gib, quick: memory of one nvcc call, and whether it takes seconds; both measured with CUDA 13.0.
    """

    name: str
    package: str
    about: str
    units: Callable[[Path], list[Unit]]
    flags: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()
    majors: Callable[[Path], tuple[int, ...] | None] = lambda root: None
    needs_tvm_ffi: bool = False
    peak_gib: float = 1.0
    quick: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"


def find(full_name: str) -> Module:
    """The module of that name. Raises LabError naming all."""
    try:
        return MODULES[full_name]
    except KeyError:
        raise LabError(f"no module {full_name!r}; there are {', '.join(MODULES)}") from None


def _probe(name: str, shape: str, about: str) -> Module:
    def units(root: Path) -> list[Unit]:
        return [Unit(shape, (_PROBES / f"{name}.cu").read_text(encoding="utf-8"), name)]

    return Module(name, "lab", about, units, quick=True)


# FlashInfer: flags of jit/core.py gen_jit_spec and of the module's own generator, less what concerns linking and the host.
_FLASHINFER_FLAGS = (
    *("-std=c++17", "-use_fast_math", "-DNDEBUG", "-O3", "--expt-relaxed-constexpr", "-static-global-template-stub=false"),
    *("-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"),
    *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1", "-DENABLE_BF16", "-DENABLE_FP4"),
)
_FLASHINFER_INCLUDES = tuple(
    f"flashinfer/data/{folder}"
    for folder in (
        "csrc/nv_internal",
        "csrc/nv_internal/include",
        "cccl/cub",
        "cccl/libcudacxx/include",
        "cccl/thrust",
        "include",
        "csrc",
        "cutlass/include",
        "cutlass/tools/util/include",
        "spdlog/include",
    )
)
_QUANTIZE_FLAGS = (*_FLASHINFER_FLAGS, "-DENABLE_FP8")
_GEMM_FLAGS = (*_FLASHINFER_FLAGS, "-DCUTLASS_ENABLE_GDC_FOR_SM100=1")
_QUANTIZE_KERNELS = "quantize_with_block_size(_tma)?"
_NVFP4_QUANTIZE = """#include "tensorrt_llm/kernels/quantization.cuh"
namespace tensorrt_llm::kernels {
__attribute__((used)) auto* const kernel =
    &quantize_with_block_size<BlockScaleQuantizationType::FP16_TO_FP4, __nv_bfloat16, 16, /*UE8M0_SF=*/false>;
}
"""


def _quantize(root: Path) -> list[Unit]:
    return [Unit("bf16_to_nvfp4", _NVFP4_QUANTIZE, _QUANTIZE_KERNELS, multiplies=False)]


def _all_quantize(root: Path) -> list[Unit]:
    source = "flashinfer/data/csrc/nv_internal/cpp/kernels/quantization.cu"
    return [Unit("quantization", _read(root, source), _QUANTIZE_KERNELS, multiplies=False)]


def _gemm(generator: str, template: str, kernels: Callable[[str, tuple[int, ...]], Iterator[tuple[str, str]]]):
    """Units of a CUTLASS FP4 GEMM module: one for each tile in the list that `generator` in jit/gemm/core.py walks, bf16 output."""

    def units(root: Path) -> list[Unit]:
        text = jinja2.Template(_read(root, f"flashinfer/data/csrc/{template}.jinja"))
        found = []
        for tile in _assigned(_function(root, generator), "cta_m_n_k_list"):
            m, n, k = tile
            rendered = text.render(type="__nv_bfloat16", cta_m=m, cta_n=n, cta_k=k)
            found.append(Unit(f"bf16_{m}x{n}x{k}", rendered, "device_kernel", tuple(kernels(rendered, tile))))
        return sorted(found, key=lambda unit: "128x128x256" not in unit.name)  # the tile that every target has comes first

    return units


def _sm120_shared(rendered: str, tile: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    m, n, k = tile
    for swap in re.findall(r"_1SM, (true|false)\)", rendered):
        struct = f"DeviceGemmFp4GemmSm120___nv_bfloat16_{m}_{n}_{k}_1_1_1_1SM{swap}"
        for scheduler in ("Default", "StreamK"):
            label = f"{scheduler.lower()}{'_swapped' if swap == 'true' else ''}"
            yield label, f"flashinfer::gemm::{struct}::GemmKernel{scheduler}::SharedStorageSize"


def _sm100_shared(rendered: str, tile: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    m, n, k = tile
    for cluster_m, cluster_n, sms in re.findall(r", (\d), (\d), 1, (_[12]SM)\)", rendered):
        struct = f"DeviceGemmFp4GemmSm100___nv_bfloat16_{m}_{n}_{k}_{cluster_m}_{cluster_n}_1{sms}"
        yield f"cluster{cluster_m}x{cluster_n}{sms}", f"flashinfer::gemm::{struct}::GemmKernel::SharedStorageSize"


def _sm103_shared(rendered: str, tile: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    m, n, k = tile
    for cluster_m, cluster_n, sms in re.findall(r", (\d), (\d), 1, (_[12]SM_sm103)\)", rendered):
        struct = f"DeviceGemmFp4GemmSm103___nv_bfloat16_{m}_{n}_{k}_{cluster_m}_{cluster_n}_1{sms}"
        yield f"cluster{cluster_m}x{cluster_n}{sms}", f"flashinfer::gemm::{struct}::GemmKernel::SharedStorageSize"


def _majors(generator: str) -> Callable[[Path], tuple[int, ...] | None]:
    def majors(root: Path) -> tuple[int, ...] | None:
        calls = (node for node in ast.walk(_function(root, generator)) if isinstance(node, ast.keyword))
        found = next((node.value for node in calls if node.arg == "supported_major_versions"), None)
        return tuple(ast.literal_eval(found)) if found is not None else None

    return majors


def _function(root: Path, name: str) -> ast.FunctionDef:
    file = "flashinfer/jit/gemm/core.py"
    tree = ast.parse(_read(root, file))
    found = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if found is None:
        raise LabError(f"{root / file} has no {name}(): this FlashInfer does not have the module")
    return found


def _assigned(function: ast.FunctionDef, name: str) -> list[tuple[int, ...]]:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    return ast.literal_eval(next(node.value for node in nodes if node.targets[0].id == name))


def _read(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LabError(f"{root / name}: not in this version of the package") from error


# SGLang: flags of kernels/jit/utils/arch.py get_default_target_flags; SGL_CUDA_ARCH follows the target.
_SGLANG_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr")
_SGLANG_INCLUDES = ("sglang/kernels/jit/include", "sglang/kernels/jit/csrc", "sglang/jit_kernel/include", "sglang/jit_kernel/csrc")
# threads, m blocks, n blocks, k blocks, m_block_size_8: the FP4 instances (FP4_GET_IF) for one token and for a full batch
_MARLIN_TILES = {"decode": "256, 1, 8, 8, true", "batch": "256, 4, 16, 4, false"}


def _marlin_fp4(root: Path) -> list[Unit]:
    head = "#include <tuple>\n#include <gemm/marlin/kernel.h>\n#include <gemm/marlin/marlin_template.h>\n"
    using = "namespace sglang {}\nusing namespace sglang;\n"  # newer versions put everything into this namespace
    kernels = "".join(
        "template __global__ void device::marlin::Marlin<"
        f"nv_bfloat16, host::kFE2M1f.id(), {tile}, 4, 1, false>(MARLIN_KERNEL_PARAMS);\n"
        for tile in _MARLIN_TILES.values()
    )
    return [Unit("bf16_fp4", head + using + kernels, "Marlin")]


def _sglang_entry(header: str, function: str, kernel: str) -> Callable[[Path], list[Unit]]:
    """A whole SGLang module through its entry point, for bf16, with every optional feature that the version has off."""

    def units(root: Path) -> list[Unit]:
        folder = next((one for one in ("sglang/kernels/jit", "sglang/jit_kernel") if (root / one / "csrc" / header).exists()), None)
        if folder is None:
            raise LabError(f"{root}: no {header} below sglang/kernels/jit/csrc or sglang/jit_kernel/csrc")
        declared = re.search(rf"template\s*<([^>]*)>\s*void {function}\(", _read(root, f"{folder}/csrc/{header}"))
        if declared is None:
            raise LabError(f"{root / folder}/csrc/{header} declares no {function}()")
        arguments = ", ".join(["nv_bfloat16", *["false"] * declared[1].count("bool ")])
        text = f"#include <tuple>\n#include <{header}>\nnamespace sglang {{}}\nusing namespace sglang;\n"
        return [Unit("bf16", f"{text}__attribute__((used)) auto* const entry = &{function}<{arguments}>;\n", kernel)]

    return units


def _gemm_module(name: str, generator: str, shared: Callable, target: str, peak_gib: float) -> Module:
    about = f"mm_fp4 with backend cutlass, {target}"
    units, majors = _gemm(generator, name, shared), _majors(generator)
    return Module(name, "flashinfer", about, units, _GEMM_FLAGS, _FLASHINFER_INCLUDES, majors, peak_gib=peak_gib)


_ALL = (
    _probe("mma_block_scaled_fp4", "m16n8k64", "the warp-level FP4 instruction of SM120"),
    _probe("tcgen05_block_scaled_fp4", "cta_group_1", "the FP4 instruction of SM100"),
    _probe("mma_bf16", "m16n8k16", "the bf16 instruction behind weight-only kernels"),
    Module(
        "nvfp4_quantize",
        "flashinfer",
        "bf16 activations to NVFP4, one kernel",
        _quantize,
        _QUANTIZE_FLAGS,
        _FLASHINFER_INCLUDES,
        quick=True,
    ),
    Module(
        "fp4_quantization",
        "flashinfer",
        "every quantise kernel (1 min)",
        _all_quantize,
        _QUANTIZE_FLAGS,
        _FLASHINFER_INCLUDES,
        peak_gib=1.5,
    ),
    _gemm_module("fp4_gemm_cutlass_sm120", "gen_gemm_sm120_module_cutlass_fp4", _sm120_shared, "SM120 (1 min a tile)", 7),
    _gemm_module("fp4_gemm_cutlass", "gen_gemm_sm100_module_cutlass_fp4", _sm100_shared, "SM100 (1 min a tile)", 6),
    _gemm_module("fp4_gemm_cutlass_sm103", "gen_gemm_sm103_module_cutlass_fp4", _sm103_shared, "SM103 (1 min a tile)", 6),
    Module(
        "marlin_fp4",
        "sglang",
        "Marlin W4A16, the NVFP4 kernels for one token and for a full batch",
        _marlin_fp4,
        _SGLANG_FLAGS,
        _SGLANG_INCLUDES,
        needs_tvm_ffi=True,
        quick=True,
    ),
    Module(
        "gptq_marlin",
        "sglang",
        "Marlin dense, all formats (2 to 3 min)",
        _sglang_entry("gemm/marlin/gptq_marlin.cuh", "gptq_marlin_gemm", "Marlin"),
        _SGLANG_FLAGS,
        _SGLANG_INCLUDES,
        needs_tvm_ffi=True,
        peak_gib=2,
    ),
    Module(
        "moe_wna16_marlin",
        "sglang",
        "Marlin MoE, all formats (2 to 3 min)",
        _sglang_entry("gemm/marlin_moe/moe_wna16_marlin.cuh", "moe_wna16_marlin_gemm", "Marlin"),
        _SGLANG_FLAGS,
        _SGLANG_INCLUDES,
        needs_tvm_ffi=True,
        peak_gib=2,
    ),
)
MODULES = {module.full_name: module for module in _ALL}
QUICK = tuple(name for name, module in MODULES.items() if module.quick)
