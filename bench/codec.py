"""Speed and peak memory of the codec beside ModelOpt's and torchao's, on a CPU.

    python bench/codec.py [--size 4096] [--threads 2] [--rounds 7]

bf16 [size, size] of normal numbers. The three take turns, so a busy machine slows all of them; the best round counts.
The last line of stdout is one JSON object: ratios (> 1: ours is faster), Melem/s of each, peak memory of ours with
input and output counted, over the bytes of the bf16 tensor, and whether all results were equal bit for bit.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, MODELOPT, TORCHAO
from nvfp4lab.stack import capture

STATUS = Path("/proc/self/status")


def contenders(x: torch.Tensor) -> tuple[dict[str, Callable], dict[str, Callable]]:
    """(quantise, dequantise) by name; each works on the same x and global scale."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as TorchaoTensor

    g = codec.global_scale_of(x)
    ours = codec.quantize(x, global_scale=g)
    packed, block_scale, _ = NVFP4QTensor.quantize(x.clone(), BLOCK_SIZE, weights_scaling_factor_2=g)
    torchao = TorchaoTensor.to_nvfp4(x, per_tensor_scale=g)
    scales = {"scale": block_scale, "double_scale": g, "block_sizes": {-1: BLOCK_SIZE}}
    quantise = {
        "ours": lambda: codec.quantize(x, global_scale=g),
        "ours_as_torchao": lambda: codec.quantize(x, global_scale=g, convention=TORCHAO),
        "modelopt": lambda: NVFP4QTensor.quantize(x, BLOCK_SIZE, weights_scaling_factor_2=g),
        "torchao": lambda: TorchaoTensor.to_nvfp4(x, per_tensor_scale=g),
    }
    dequantise = {
        "ours": lambda: codec.dequantize(ours, torch.bfloat16),
        "modelopt": lambda: packed.dequantize(torch.bfloat16, **scales),
        "torchao": lambda: torchao.dequantize(torch.bfloat16),
    }
    return quantise, dequantise


def best_s(functions: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Seconds of the fastest of `rounds` calls of each, taking turns, after one call each to warm up."""
    best = dict.fromkeys(functions, float("inf"))
    for round_index in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_index:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak_extra_bytes(function: Callable) -> int:
    """Most resident memory that `function` added to this process at any time (Linux)."""

    def kib(field: str) -> int:
        return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
    before = kib("VmRSS:")
    function()
    return (kib("VmHWM:") - before) * 1024


def equal_to_packages(x: torch.Tensor) -> bool:
    """Whether codes, block scales and values equal ModelOpt's and torchao's bit for bit on x."""
    quantise, dequantise = contenders(x)
    packed, block_scale, _ = quantise["modelopt"]()
    torchao, ours, as_torchao = quantise["torchao"](), quantise["ours"](), codec.quantize(x, convention=TORCHAO)
    pairs = (
        (packed._quantized_data, ours.codes),
        (block_scale, ours.block_scale),
        (dequantise["modelopt"](), codec.dequantize(ours)),
        (torchao.qdata, as_torchao.codes),
        (torchao.scale, as_torchao.block_scale),
        (dequantise["torchao"](), codec.dequantize(as_torchao, convention=TORCHAO)),
    )
    return all(torch.equal(theirs.view(torch.uint8), mine.view(torch.uint8)) for theirs, mine in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, a multiple of 16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    x = torch.randn(args.size, args.size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    input_bytes = x.numel() * x.element_size()

    quantised = codec.quantize(x, convention=MODELOPT)  # also warms up, so that tables are not counted as peak
    codec.dequantize(quantised)
    memory = {
        "quantise_peak_vs_input": 1 + peak_extra_bytes(lambda: codec.quantize(x)) / input_bytes,
        "dequantise_peak_vs_input": quantised_share(quantised, input_bytes)
        + peak_extra_bytes(lambda: codec.dequantize(quantised)) / input_bytes,
    }
    seconds = dict(zip(("quantise", "dequantise"), (best_s(functions, args.rounds) for functions in contenders(x)), strict=True))
    figures = {
        f"{kind}_vs_{name}": of[name] / of["ours"] for kind, of in seconds.items() for name in ("modelopt", "torchao")
    } | memory
    figures = {name: round(value, 2) for name, value in figures.items()}
    speeds = {f"{kind}_melem_s": {name: round(x.numel() / s / 1e6, 1) for name, s in of.items()} for kind, of in seconds.items()}
    for kind, of in speeds.items():
        print(kind, *(f"{name} {speed}" for name, speed in of.items()), sep="  ")
    print(json.dumps(figures | speeds | {"bit_equal": equal_to_packages(x), "threads": args.threads, "machine": capture().machine}))


def quantised_share(quantised: codec.NVFP4Tensor, input_bytes: int) -> float:
    """Bytes of the quantised parts over those of the bf16 tensor (9/32)."""
    return (quantised.codes.numel() + quantised.block_scale.numel()) / input_bytes


if __name__ == "__main__":
    main()
