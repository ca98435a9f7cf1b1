"""The codec's cost: memory within three times the input, and the bench's contract for scripts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvfp4lab.nvfp4 import codec

BENCH = Path(__file__).parents[1] / "bench" / "codec.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_codec", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_is_at_most_three_times_the_input(bench):
    x = torch.randn(4096, 4096).to(torch.bfloat16)
    input_bytes = x.numel() * x.element_size()
    quantised = codec.quantize(x)
    codec.dequantize(quantised)  # tables are made once and are not counted
    assert input_bytes + bench.peak_extra_bytes(lambda: codec.quantize(x)) <= 3 * input_bytes
    assert input_bytes + bench.peak_extra_bytes(lambda: codec.dequantize(quantised)) <= 3 * input_bytes


def test_peak_memory_sees_what_is_allocated(bench):
    """The measure itself: 256 MiB touched and freed again are seen."""
    assert bench.peak_extra_bytes(lambda: torch.ones(256 << 20, dtype=torch.uint8).sum()) >= 250 << 20


def test_last_line_is_the_contract():
    pytest.importorskip("modelopt")
    pytest.importorskip("torchao")
    command = [sys.executable, str(BENCH), "--size", "256", "--rounds", "1", "--threads", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(printed.splitlines()[-1])
    ratios = ("quantise_vs_modelopt", "dequantise_vs_modelopt", "quantise_vs_torchao", "dequantise_vs_torchao")
    assert all(result[name] > 0 for name in ratios)
    assert result["bit_equal"] is True
