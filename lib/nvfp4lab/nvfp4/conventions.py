"""Named NVFP4 conventions: the choices that codecs make differently, and who makes which.

A block of 16 values shares one E4M3 `block_scale`; a tensor (or expert) has one fp32 `global_scale` g, and
`value = code * block_scale * g`. Everything below is what the format leaves open. There is no single reference:
whoever holds a kernel to a codec has to say which.
"""

import dataclasses
import enum

from nvfp4lab.errors import LabError

BLOCK_SIZE = 16  # values that share one block scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; code + 8 is the negative
E2M1_MAX = 6.0
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # a value there is a tie between code i and i + 1
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN_SUBNORMAL = 2.0**-9


class TieRule(enum.StrEnum):
    """Where a value exactly between two E2M1 neighbours goes."""

    TO_EVEN = "to even"  # the neighbour with mantissa bit 0: the IEEE default and `cvt.rn`
    TO_ZERO = "to zero"
    AWAY = "away from zero"


class GlobalScaleRule(enum.StrEnum):
    """How the global scale comes from the tensor's largest magnitude. 2688 = 6 * 448. E is the encode scale 1 / g."""

    AMAX_OVER_2688 = "g = amax / 2688"
    E_2688_OVER_AMAX = "E = 2688 / amax"
    E_2688_OVER_AMAX_IN_DTYPE = "E = 2688 / amax, in the dtype of x"  # 8 bits of E for bf16


class BlockScaleRule(enum.StrEnum):
    """How the block scale comes from the block's largest magnitude `amax`, before it is rounded to E4M3.

    All are amax / 6 / g in real numbers; they round differently.
    """

    AMAX_OVER_6G = "amax / (6 g)"
    AMAX_OVER_6_OVER_G = "(amax / 6) / g"
    E_TIMES_AMAX_OVER_6_IN_DTYPE = "E * (amax / 6 in the dtype of x)"
    E_TIMES_AMAX_RCP_6 = "E * (amax * (1 / 6))"


class ElementRule(enum.StrEnum):
    """How a value x is brought to the E2M1 range, s being the rounded block scale."""

    DIVIDE = "x / (s g)"
    DIVIDE_BY_S_OVER_E = "x / (s / E)"
    TIMES_INV_G_OVER_S = "x * ((1 / g) / s)"
    TIMES_RCP_S_RCP_E = "x * (1 / (s * (1 / E)))"


class ZeroSign(enum.StrEnum):
    """Code of a negative value that rounds to zero, and of -0.0 itself."""

    OF_VALUE = "x < 0"  # small negatives become -0 (code 8), -0.0 becomes +0
    OF_BIT = "sign bit"  # both become -0


@dataclasses.dataclass(frozen=True)
class Convention:
    """One codec's answers; any field may be changed with `dataclasses.replace`.

    zero_block_scale: scale of a block whose quotient above is zero, as an all-zero block's is.
    min_block_scale: smaller positive quotients are raised to it before rounding to E4M3; 0.0 where nothing is raised.
    underflow_block_scale: stands where the rounding to E4M3 gave zero.
    nan_code: code of a NaN of either sign.
    amax_skips_nan: the block's amax ignores NaN (CUDA `__hmax2`) instead of becoming NaN.
    flush_subnormals: fp32 subnormals count as zero (`-ftz=true`).
    decodes_negative_zero: code 8 dequantises to -0.0 and not to +0.0.
    source: where this was read.
    """

    name: str
    source: str
    global_scale: GlobalScaleRule
    block_scale: BlockScaleRule
    element: ElementRule
    zero_block_scale: float
    min_block_scale: float
    underflow_block_scale: float = 0.0
    ties: TieRule = TieRule.TO_EVEN
    zero_sign: ZeroSign = ZeroSign.OF_BIT
    nan_code: int = 7
    amax_skips_nan: bool = False
    flush_subnormals: bool = False
    decodes_negative_zero: bool = True

    def __post_init__(self):
        if not 0 <= self.nan_code <= 15:
            raise LabError(f"convention {self.name}: nan_code {self.nan_code} is no E2M1 code, needs 0..15")


MODELOPT = Convention(
    name="modelopt",
    source="nvidia-modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py:187 and :249",
    global_scale=GlobalScaleRule.AMAX_OVER_2688,
    block_scale=BlockScaleRule.AMAX_OVER_6G,
    element=ElementRule.DIVIDE,
    zero_block_scale=1.0,
    min_block_scale=E4M3_MIN_SUBNORMAL,
    zero_sign=ZeroSign.OF_VALUE,
    decodes_negative_zero=False,
)

TORCHAO = Convention(
    name="torchao",
    source="torchao 0.18.0, prototype/mx_formats/nvfp4_tensor.py:772 nvfp4_quantize",
    global_scale=GlobalScaleRule.AMAX_OVER_2688,
    block_scale=BlockScaleRule.AMAX_OVER_6_OVER_G,
    element=ElementRule.TIMES_INV_G_OVER_S,
    zero_block_scale=E4M3_MIN_NORMAL,
    min_block_scale=E4M3_MIN_NORMAL,
    nan_code=3,
)

# The eager path that runs on a CPU. Its Triton path rounds the scaled value to bf16 before it rounds it to E2M1.
COMPRESSED_TENSORS = Convention(
    name="compressed-tensors",
    source="compressed-tensors 0.18.0, quantization/utils/helpers.py:50 and :308, quantization/utils/fp4_utils.py:80",
    global_scale=GlobalScaleRule.E_2688_OVER_AMAX_IN_DTYPE,
    block_scale=BlockScaleRule.E_TIMES_AMAX_OVER_6_IN_DTYPE,
    element=ElementRule.DIVIDE_BY_S_OVER_E,
    zero_block_scale=0.0,
    min_block_scale=0.0,
    underflow_block_scale=0.125,
    zero_sign=ZeroSign.OF_VALUE,
    nan_code=0,
)

# The CUDA kernel with its default flags. It takes 1 / x from `rcp.approx.ftz.f32`, at most 1 ulp from the rounded
# reciprocal that is computed here, so a value within an ulp of a tie may land one code away on the GPU. The kernel's
# body is compiled for sm_100 and later alone; on an older GPU it leaves its outputs as they were (quantization.cuh:234).
FLASHINFER = Convention(
    name="flashinfer",
    source="flashinfer 0.6.15.post1, csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh:432 cvt_warp_fp16_to_fp4",
    global_scale=GlobalScaleRule.E_2688_OVER_AMAX,
    block_scale=BlockScaleRule.E_TIMES_AMAX_RCP_6,
    element=ElementRule.TIMES_RCP_S_RCP_E,
    zero_block_scale=0.0,
    min_block_scale=0.0,
    amax_skips_nan=True,
    flush_subnormals=True,
)

CONVENTIONS: dict[str, Convention] = {c.name: c for c in (MODELOPT, TORCHAO, COMPRESSED_TENSORS, FLASHINFER)}
