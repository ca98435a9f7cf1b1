"""Faults: each is there under its own name, and its state does not leak from one injection to the next."""

import pytest
import torch

from nvfp4lab.kernels import reference
from nvfp4lab.kernels.certificate import FAULTS
from nvfp4lab.kernels.probes_exact import exact_gemm
from nvfp4lab.kernels.shapes import GemmShape

REQUIRED = (  # of the issue: a few words of each class that must be there
    "NaN code K-block swapped shifted alpha-x-1.01 alpha-x-5 stale wrong-expert gate-and-up-swapped neighbour merged race one-ulp",
    "capacity one-wrong-scale router-weight-applied-twice router-weight-missing offset-ignored unless-M fp16-acc truncated",
)


def test_at_least_thirty_faults_with_distinct_names_and_sources():
    judged = [fault for fault in FAULTS if not fault.indistinguishable]
    assert len(judged) >= 30 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.source for fault in FAULTS)


@pytest.mark.parametrize("words", " ".join(REQUIRED).split())
def test_required_class_is_there(words):
    assert any(words.replace("-", " ") in fault.name for fault in FAULTS)


def test_state_is_fresh_for_each_injection():
    stale = next(fault for fault in FAULTS if fault.name == "stale output")
    probes = [exact_gemm(GemmShape(5, 16, 32), seed, 24) for seed in (0, 1)]
    for probe in probes:
        out = torch.empty_like(probe.expected)
        assert torch.equal(stale.inject(reference.gemm)(probe.problem, out), probe.expected)
    one = stale.inject(reference.gemm)
    outputs = [one(probe.problem, torch.empty_like(probe.expected)) for probe in probes]
    assert torch.equal(outputs[1], probes[0].expected)
