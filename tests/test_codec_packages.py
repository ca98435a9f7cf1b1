"""The codec against the real packages: bit for bit, each under its own convention, on inputs made to tell them apart."""

import pytest
import torch

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.consensus import INPUTS
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, COMPRESSED_TENSORS, MODELOPT, TORCHAO

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def as_scale(block_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes with every NaN made the same one."""
    return torch.where(block_scale.float().isnan(), 0x7F, block_scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_equals_modelopt(name, dtype):
    package = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    x, g = INPUTS[name].make(dtype)
    theirs, their_scale, _ = package.quantize(x.clone(), BLOCK_SIZE, weights_scaling_factor_2=g)
    ours = codec.quantize(x, global_scale=g, convention=MODELOPT)
    assert same_bits(theirs._quantized_data, ours.codes)
    assert torch.equal(as_scale(their_scale), as_scale(ours.block_scale))
    for out in DTYPES:
        value = theirs.dequantize(out, scale=their_scale, double_scale=g, block_sizes={-1: BLOCK_SIZE})
        assert same_bits(value.nan_to_num(nan=7e4), codec.dequantize(ours, out).nan_to_num(nan=7e4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_equals_torchao(name, dtype):
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x, g = INPUTS[name].make(dtype)
    # It refuses fp16; every fp16 number is an fp32 one, and it converts to fp32 first.
    given = x.float() if dtype is torch.float16 else x
    theirs = module.NVFP4Tensor.to_nvfp4(given, per_tensor_scale=g)
    ours = codec.quantize(x, global_scale=g, convention=TORCHAO)
    assert torch.equal(as_scale(theirs.scale), as_scale(ours.block_scale))
    sound = ~ours.block_scale.float().isnan().repeat_interleave(BLOCK_SIZE // 2, dim=-1)  # codes under a NaN mean nothing
    assert torch.equal(theirs.qdata[sound], ours.codes[sound])
    for out in DTYPES:
        value = theirs.dequantize(out)
        assert same_bits(value.nan_to_num(nan=7e4), codec.dequantize(ours, out, convention=TORCHAO).nan_to_num(nan=7e4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in INPUTS if INPUTS[name].finite])
def test_equals_compressed_tensors(name, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    x, g = INPUTS[name].make(dtype)
    encode_scale = (1.0 / g).view(1)
    blocks = x.view(x.shape[0], -1, BLOCK_SIZE)
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), NVFP4["weights"], encode_scale)
    theirs = pack_fp4_to_uint8(quantize(x, scale, zero_point, NVFP4["weights"], global_scale=encode_scale))
    ours = codec.quantize(x, encode_scale=encode_scale[0], convention=COMPRESSED_TENSORS)
    assert same_bits(scale.to(torch.float8_e4m3fn), ours.block_scale)
    assert same_bits(theirs, ours.codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_global_scales_are_the_packages_own(dtype):
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(dtype) * 1.37
    assert torch.equal(codec.global_scale_of(x, MODELOPT), modelopt.get_weights_scaling_factor_2(x))
    assert torch.equal(codec.global_scale_of(x, TORCHAO), torchao.per_tensor_amax_to_scale(x.abs().max()))
    assert torch.equal(codec.global_scale_of(x, COMPRESSED_TENSORS), 1.0 / helpers.generate_gparam(x.amin(), x.amax())[0])
