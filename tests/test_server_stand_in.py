"""The stand-in for sgl_kernel can be imported in every way that SGLang does, and computes nothing."""

import subprocess
import sys

import pytest

from nvfp4lab.server.arms import STAND_IN


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(STAND_IN)}, capture_output=True, text=True, timeout=20
    )


@pytest.mark.parametrize(
    "code",
    [
        "import sgl_kernel; assert 'stand.in' in sgl_kernel.__version__",
        "from sgl_kernel import rmsnorm, silu_and_mul",
        "import sgl_kernel.kvcacheio; from sgl_kernel.kvcacheio import transfer_kv_all_layer",
        "from sgl_kernel.scalar_type import ScalarType, scalar_types; kinds = [scalar_types.uint4b8, scalar_types.float4_e2m1f]",
        "import sgl_kernel.a.b.c as deep; deep.anything",
        "import sgl_kernel; assert not hasattr(sgl_kernel, '__wrapped__')",
    ],
)
def test_names_exist(code):
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import sgl_kernel; sgl_kernel.cutlass_scaled_fp4_mm(1)", "sgl_kernel.cutlass_scaled_fp4_mm"),
        ("from sgl_kernel.kvcacheio import transfer_kv; transfer_kv()", "sgl_kernel.kvcacheio.transfer_kv"),
    ],
)
def test_a_call_fails_loudly_with_the_kernels_name(code, name):
    done = run(code)
    assert done.returncode == 1 and f"NotImplementedError: {name} was called" in done.stderr
