"""The params files for GPUs that are not here: complete, valid, and without an arm that source proves to raise."""

import functools
from pathlib import Path

import pytest

from nvfp4lab import params
from nvfp4lab.batch import notebooks
from nvfp4lab.server import arms_routes

ROOT = Path(__file__).resolve().parents[1]
FILES = ["rtx_pro_6000", "b200", "qwen3_5_397b_nvfp4"]
ARCHITECTURES = {"smol-nvfp4": "MistralForCausalLM", "smol-moe-nvfp4": "Qwen2MoeForCausalLM"}
# Values that work as far as source shows and are still no arm: development variants, LoRA, and what needs another all-to-all.
ASIDE = {"experimental_sgl_trtllm", "experimental_sgl_marlin", "lora_marlin", "megamoe", "flashinfer_megamoe"}


@pytest.fixture(params=FILES)
def p(request) -> params.Params:
    return params.load(ROOT / "params" / f"{request.param}.yaml")


def test_files_are_valid_and_complete(p):
    assert all(notebooks.path_of(name) for name in p.notebooks)
    assert {"31_server_matrix", "32_server_throughput", "40_decision"} <= set(p.notebooks)
    assert all(arm.device == "cuda" for arm in p.arms), "on a machine without a GPU these arms must not fall back to the CPU"
    assert p.restarts >= 3, "fewer starts cannot show a difference"
    assert p.cell_timeout_s is None, "all arms run in one cell"
    assert len({arm.model_copy(update={"name": "x"}).model_dump_json() for arm in p.arms}) == len(p.arms)


def test_no_field_of_a_file_is_lost_on_the_way_to_the_notebooks(p):
    """The runner passes a notebook only what its parameters cell names."""
    named = {name for notebook in p.notebooks for name in notebooks.declared(notebook).parameters}
    unused = p.model_fields_set - named - {"notebooks", "run_dir", "runs", "cell_timeout_s", "memory_gib"}
    assert not unused, f"no notebook of this file takes {sorted(unused)}"


@functools.cache
def router(sglang: str, flashinfer: str | None):
    from nvfp4lab.source.routes import open_router

    return open_router(sglang, flashinfer)


@pytest.mark.wheel
def test_arms_are_what_stage_1_says_is_worth_starting(p):
    from nvfp4lab.source.routes_query import Query

    fp4 = [arm for arm in p.arms if "nvfp4" in arm.model.lower() and not arm.model.endswith("dequantised")]
    for model in {arm.model for arm in fp4}:
        ours = [arm for arm in fp4 if arm.model == model]
        operation = "fp4_gemm" if model == "smol-nvfp4" else "moe"
        for tp, ep in {(arm.tp, arm.ep) for arm in ours}:
            query = Query(p.cc, p.quant, ARCHITECTURES.get(model, p.model_arch), tp=tp, ep=ep)
            routes = [route for route in router(p.sglang, p.flashinfer).routes(query, ops=(operation,), trapped=())]
            raising = {route.backend for route in routes if route.raises and not route.when}
            works = {route.backend for route in routes} - raising
            started = {arms_routes.asked(arm)[operation] for arm in ours if (arm.tp, arm.ep) == (tp, ep)}
            assert started <= works, f"{model}: proved to raise: {started - works}"
            if ep == 1:
                assert works - ASIDE <= started, f"{model}: worth a start, but no arm: {works - ASIDE - started}"
