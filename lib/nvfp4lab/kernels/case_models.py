"""Shapes that kernels meet in real models, computed from config.json-like records and split for tensor and expert parallelism."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError
from nvfp4lab.kernels.shapes import BLOCK, GemmShape, MoeShape, QuantiseShape, Shape

# Read from the models' own config.json. Where only routed experts are FP4 (Qwen3.5-397B), no attention is listed.
MODELS: dict[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "smol_padded": {
        "hidden_size": 640,
        "intermediate_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "smol_moe": {"hidden_size": 640, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "qwen3_5_397b_a17b": {"hidden_size": 4096, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024},
    "qwen3_235b_a22b": {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "qwen3_30b_a3b": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek_v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    "glm_4_7": {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "llama_3_1_8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}

# Around every tile height, width and alignment in use. Boundary shapes find 78 % of tail-mask bugs without a false positive,
# regular ones none (arXiv 2606.27396); 2001 is the off-bucket M of flashinfer #3192.
BOUNDARY_M = (*range(1, 18), 127, 128, 129, 2001)
BOUNDARY_N = (16, 32, 48, 64, 80, 128, 144, 192, 256, 272)
BOUNDARY_K = (16, 32, 48, 64, 96, 128, 160, 192, 256, 272)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A shape and where it comes from, for example "qwen3_30b_a3b tp2 qkv"."""

    shape: Shape
    source: str


def boundary_shapes() -> tuple[Placed, ...]:
    """Each dimension at and off its alignments, the other two held at harmless values."""
    shapes = [
        *(GemmShape(m, 128, 256) for m in BOUNDARY_M),
        *(GemmShape(33, n, 256) for n in BOUNDARY_N),
        *(GemmShape(33, 128, k) for k in BOUNDARY_K),
        *(MoeShape(tokens, 128, 128, 8, 2) for tokens in (1, 2, 7, 8, 9, 16, 17, 127, 128, 129)),
        *(MoeShape(17, hidden, 128, 4, 2) for hidden in (64, 128, 192, 256, 320)),
        *(MoeShape(17, 128, intermediate, 4, 2) for intermediate in (64, 96, 128, 160, 192, 320)),
    ]
    return tuple(Placed(shape, "boundary") for shape in shapes)


def model_shapes(model: str, tokens: int, tp: int = 1, ep: int = 1) -> tuple[Placed, ...]:
    """Every FP4 kernel call of one layer of `model` with that many rows, on the last rank of the split.

    model: a name in MODELS, "boundary", or the path of a config.json. Raises LabError for another, and for a split that does
    not divide the model into blocks of 16.
    """
    if model == "boundary":
        return boundary_shapes()
    config = _config(model)
    label = f"{model}" + (f" tp{tp}" if tp > 1 else "") + (f" ep{ep}" if ep > 1 else "")
    return tuple(Placed(shape, f"{label} {part}") for part, shape in _shapes(config, label, tokens, tp, ep))


def _config(model: str) -> Mapping[str, Any]:
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    if path.suffix != ".json" or not path.exists():
        raise LabError(
            f"kernel_models: no model {model!r}; there are {', '.join((*MODELS, 'boundary'))}, or give the path of a config.json"
        )
    read = json.loads(path.read_text(encoding="utf-8"))
    return read.get("text_config", read)


def _shapes(config: Mapping[str, Any], label: str, tokens: int, tp: int, ep: int) -> Iterator[tuple[str, Shape]]:
    hidden = config["hidden_size"]
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and not config.get("kv_lora_rank"):  # latent attention has projections of other shapes
        head_dim = config.get("head_dim") or hidden // heads
        own_heads, own_kv = _split(heads * head_dim, tp, label), max(1, kv_heads // tp) * head_dim
        yield "qkv", GemmShape(tokens, own_heads + 2 * own_kv, hidden)
        yield "o", GemmShape(tokens, hidden, own_heads)
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts")
    if (inner := config.get("intermediate_size")) and (not experts or _has_dense_layers(config)):
        yield "gate_up", GemmShape(tokens, 2 * _split(inner, tp, label), hidden)
        yield "down", GemmShape(tokens, hidden, _split(inner, tp, label))
    if experts:
        if experts % ep:
            raise LabError(f"{label}: {experts} experts cannot be split over {ep} ranks")
        own, inner = experts // ep, _split(config.get("moe_intermediate_size") or config["intermediate_size"], tp, label)
        place = (own * (ep - 1), experts) if ep > 1 else (0, 0)
        yield "experts", MoeShape(tokens, hidden, inner, own, config["num_experts_per_tok"], *place)
    yield "activations", QuantiseShape(tokens, hidden)


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers of a mixture of experts have an MLP of `intermediate_size`: its config then names them or counts them."""
    return bool(config.get("first_k_dense_replace") or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1)


def _split(size: int, parts: int, label: str) -> int:
    if size % (parts * BLOCK):
        raise LabError(f"{label}: {size} cannot be split into {parts} parts of whole blocks of {BLOCK}")
    return size // parts
