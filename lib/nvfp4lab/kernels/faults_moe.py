"""Broken fused-MoE kernels as data. See `faults` for the shape of a fault."""

import dataclasses
import math
from collections.abc import Callable

import torch

from nvfp4lab.kernels import reference
from nvfp4lab.kernels.faults import (
    Fault,
    Inject,
    instead,
    on_output,
    on_problem,
    one_value,
    one_wrong_code,
    one_wrong_scale,
    scaled,
    with_codes,
    with_scales,
)
from nvfp4lab.kernels.operands import Fp4Operand, MoeProblem, Problem
from nvfp4lab.kernels.reference import Kernel, Order


def _on_ids(edit: Callable[[torch.Tensor, MoeProblem], torch.Tensor]) -> Inject:
    return on_problem(
        lambda problem: dataclasses.replace(problem, topk_ids=edit(problem.topk_ids.clone(), problem).to(torch.int32))
    )


def _on_router(edit: Callable[[torch.Tensor, MoeProblem], torch.Tensor]) -> Inject:
    return on_problem(lambda problem: dataclasses.replace(problem, topk_weights=edit(problem.topk_weights.clone(), problem)))


def _on_part(name: str, edit: Callable[[Fp4Operand], Fp4Operand]) -> Inject:
    return on_problem(lambda problem: dataclasses.replace(problem, **{name: edit(getattr(problem, name))}))


def _next_expert(ids: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    return problem.expert_offset + (ids - problem.expert_offset + 1) % problem.experts


def _one_token_misrouted(ids: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    token = ids.shape[0] // 2
    ids[token] = _next_expert(ids[token], problem)
    return ids


def _swap_gate_up(problem: MoeProblem) -> MoeProblem:
    return dataclasses.replace(problem, gate=problem.up, up=problem.gate)


def _half_interleaved(problem: MoeProblem) -> MoeProblem:
    """Rows of gate and up taken from one another in blocks of 8, as after a missing de-interleave."""
    rows = torch.arange(problem.gate.codes.shape[1], device=problem.device)
    odd = (rows // 8) % 2 == 1
    codes = [torch.where(odd[:, None], b.codes, a.codes) for a, b in ((problem.gate, problem.up), (problem.up, problem.gate))]
    return dataclasses.replace(
        problem, gate=dataclasses.replace(problem.gate, codes=codes[0]), up=dataclasses.replace(problem.up, codes=codes[1])
    )


def _neighbour_scale(operand: Fp4Operand) -> Fp4Operand:
    """One expert's global scale taken from its neighbour."""
    scales = operand.global_scale.clone()
    scales[0] = operand.global_scale[1]
    return dataclasses.replace(operand, global_scale=scales)


def _one_global_scale(operand: Fp4Operand) -> Fp4Operand:
    """All experts share the first one's global scale."""
    return dataclasses.replace(operand, global_scale=operand.global_scale[:1].expand(operand.global_scale.shape[0]).contiguous())


def _merged(problem: MoeProblem) -> MoeProblem:
    """`up` dequantised with the global scale of `gate`."""
    return dataclasses.replace(problem, up=dataclasses.replace(problem.up, global_scale=problem.gate.global_scale))


def _past_capacity(capacity_factor: float) -> Inject:
    """Tokens of an expert past its capacity contribute nothing."""

    def edit(weights: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
        capacity = max(1, int(capacity_factor * problem.topk_ids.numel() / problem.experts_global))
        for expert in problem.topk_ids.unique().tolist():
            token, slot = (problem.topk_ids == expert).nonzero(as_tuple=True)
            weights[token[capacity:], slot[capacity:]] = 0.0
        return weights

    return _on_router(edit)


def _tail_of_each_expert(tile: int) -> Inject:
    """The last, partial tile of an expert's tokens is lost."""

    def edit(weights: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
        for expert in problem.topk_ids.unique().tolist():
            token, slot = (problem.topk_ids == expert).nonzero(as_tuple=True)
            full = token.numel() - token.numel() % tile
            weights[token[full:], slot[full:]] = 0.0
        return weights

    return _on_router(edit)


def _offset_ignored(problem: MoeProblem) -> MoeProblem:
    """Global expert ids used as local ones."""
    return dataclasses.replace(problem, expert_offset=0)


def _remote_wraps(problem: MoeProblem) -> MoeProblem:
    """Tokens of experts on other ranks are computed with local ones instead of skipped."""
    return dataclasses.replace(problem, topk_ids=(problem.expert_offset + problem.topk_ids % problem.experts).to(torch.int32))


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    return instead(lambda problem, out: reference.moe(problem, out, activation=function))


def _first_slot_only(weights: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    weights[:, 1:] = 0
    return weights


def _empty_expert_poisons(out: torch.Tensor, problem: Problem) -> None:
    """An expert without tokens runs anyway and writes NaN to row 0."""
    if problem.topk_ids.unique().numel() < problem.experts_global:
        out[0] = math.nan


def _unrouted_rows_not_written(out: torch.Tensor, problem: MoeProblem) -> None:
    local = problem.topk_ids - problem.expert_offset
    out[~((local >= 0) & (local < problem.experts)).any(1)] = math.nan


def _stale_rows(kernel: Kernel) -> Kernel:
    """The permuted activations of the last call with as many tokens are used again."""
    kept: dict[int, MoeProblem] = {}

    def broken(problem: MoeProblem, out: torch.Tensor) -> torch.Tensor:
        last = kept.setdefault(problem.topk_ids.shape[0], problem)
        return kernel(dataclasses.replace(problem, activations=last.activations), out)

    return broken


def _coarse_intermediate(problem: MoeProblem) -> MoeProblem:
    """The intermediate's global scale 512 times too large: block scales fall below E4M3's range."""
    return dataclasses.replace(problem, intermediate_scale=problem.intermediate_scale * 512)


def _scales_of_neighbour_row(operand: Fp4Operand) -> Fp4Operand:
    return with_scales(operand, lambda scales: scales.roll(1, -2))


def _bf16_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x.bfloat16()).float()


_MOE: tuple[tuple[str, str, Inject], ...] = (
    ("wrong expert for every token", "expert map", _on_ids(_next_expert)),
    ("wrong expert for one token", "sort by expert", _on_ids(_one_token_misrouted)),
    ("expert ids of one token reversed, weights not", "top-k order", _on_ids(lambda ids, _: ids.flip(1))),
    ("gate and up swapped", "W13 order", on_problem(_swap_gate_up)),
    ("gate and up rows interleaved", "missing de-interleave", on_problem(_half_interleaved)),
    ("router weight applied twice", "apply_router_weight_on_input", _on_router(lambda w, _: w * w)),
    ("router weight missing", "loader", _on_router(lambda w, _: torch.ones_like(w))),
    ("router weight rounded to fp8", "type", _on_router(lambda w, _: (w * 1.0625).to(torch.float8_e4m3fn).float())),
    ("only the first of top-k experts counts", "finalise", _on_router(_first_slot_only)),
    ("gate/up global scale of one expert from its neighbour", "grouped GEMM alpha", _on_part("gate", _neighbour_scale)),
    ("down global scale of one expert from its neighbour", "grouped GEMM alpha", _on_part("down", _neighbour_scale)),
    ("down global scale of expert 0 for all", "vllm #35497: every expert but the first wrong", _on_part("down", _one_global_scale)),
    ("gate and up global scales merged", "SGLang keeps the gate's", on_problem(_merged)),
    ("tokens past an expert's capacity dropped", "capacity factor", _past_capacity(1.25)),
    ("partial tile of an expert's tokens lost", "M tail of a grouped GEMM", _tail_of_each_expert(4)),
    ("expert-parallel offset ignored", "flashinfer #3383", on_problem(_offset_ignored)),
    ("remote experts computed with local weights", "expert map", on_problem(_remote_wraps)),
    ("tokens without a local expert not written", "finalise", on_output(_unrouted_rows_not_written)),
    ("empty expert writes NaN", "grouped GEMM with M = 0", on_output(_empty_expert_poisons)),
    ("SiLU missing", "epilogue", _activation(lambda x: x)),
    ("GELU for SiLU", "epilogue", _activation(torch.nn.functional.gelu)),
    ("ReLU for SiLU", "epilogue", _activation(torch.relu)),
    ("intermediate quantised with scale 1", "a2_gscale ignored", on_problem(_coarse_intermediate)),
    ("output scaled by the intermediate's scale twice", "alpha", _on_part("down", lambda x: scaled(x, 16.0))),
    ("one wrong code in gate", "weight preparation", _on_part("gate", lambda x: with_codes(x, one_wrong_code))),
    ("one wrong code in down", "weight preparation", _on_part("down", lambda x: with_codes(x, one_wrong_code))),
    ("one wrong block scale in up", "weight preparation", _on_part("up", lambda x: with_scales(x, one_wrong_scale))),
    ("down block scales not swizzled per expert", "vllm #35497", _on_part("down", _scales_of_neighbour_row)),
    ("bf16 accumulation in both GEMMs", "accumulator", instead(reference.moe_in(Order("blocked", 32, torch.bfloat16)))),
    ("fp16 accumulation in both GEMMs", "accumulator", instead(reference.moe_in(Order("blocked", 32, torch.float16)))),
    ("one NaN in the MoE output", "flashinfer #4486", one_value(math.nan)),
    ("stale permuted activations", "workspace keyed by tokens", _stale_rows),
)

MOE_FAULTS: tuple[Fault, ...] = (
    *(Fault(name, "moe", source, inject) for name, source, inject in _MOE),
    Fault(
        "sigmoid evaluated in bf16",
        "moe",
        "epilogue",
        _activation(_bf16_sigmoid),
        "kernels may round gate to bf16 before SiLU, which moves the result as much; the interval bound has to allow it",
    ),
)
