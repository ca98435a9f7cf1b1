"""Calls that harm a GPU's context; run in isolated workers by test_isolate_gpu.py. Imports no pytest."""

import torch

from nvfp4lab.kernels.roofline import measure_peaks


def add():
    return float((torch.ones(8, device="cuda") + 1).sum())


def _poke():
    """Launch a kernel that writes a terabyte beyond its buffer; returns before it has run."""
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void poke(float *p) { p[1ull << 40] = 1.0f; }', "poke")
    kernel((1, 1, 1), (1, 1, 1), (torch.zeros(8, device="cuda"),))


def illegal_access():
    _poke()
    torch.cuda.synchronize()


def claim_success():
    _poke()
    return "all is well"


def device_assert():
    return float(torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum())


def hang():
    torch.cuda._sleep(1 << 50)
    torch.cuda.synchronize()


def exhaust_memory():
    return [torch.empty(1 << 34, dtype=torch.uint8, device="cuda") for _ in range(4096)]


def peaks():
    return measure_peaks("cuda")
