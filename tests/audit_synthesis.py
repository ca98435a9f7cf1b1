"""Tiny synthetic checkpoints in the naming of real families, written byte by byte so that any fault can be planted."""

import dataclasses
import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

HIDDEN, INTER, EXPERTS, LAYERS = 128, 64, 4, 3


@dataclasses.dataclass
class Synthetic:
    """A checkpoint in memory. tensors: name -> (dtype, shape, bytes).

    ignore: None for a checkpoint that declares no quantisation. groups: compressed-tensors' targets, each with "NVFP4",
    "W4A16_NVFP4" or "FP8". layers: `quantized_layers` of a MIXED_PRECISION checkpoint, likewise.
    """

    config: dict
    ignore: list[str] | None
    groups: list[tuple[list[str], str]] = dataclasses.field(default_factory=list)
    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = dataclasses.field(default_factory=dict)
    hf_quant: bool = True
    kv_algo: str | None = None
    seed: int = 0

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)

    def bf16(self, path: str, n: int, k: int) -> None:
        self.tensors[f"{path}.weight"] = ("BF16", (n, k), self.random.bytes(2 * n * k))

    def vector(self, name: str, n: int, dtype: str = "BF16") -> None:
        self.tensors[name] = (dtype, (n,), np.ones(n, "<f4").tobytes() if dtype == "F32" else b"\x80\x3f" * n)

    def fp4(self, path: str, n: int, k: int, scale: float = 0.01, input_scale: float | None = 0.02) -> None:
        self.tensors[f"{path}.weight"] = ("U8", (n, k // 2), self.random.bytes(n * k // 2))
        codes = self.random.integers(0x20, 0x7F, n * k // 16, dtype=np.uint8)
        self.tensors[f"{path}.weight_scale"] = ("F8_E4M3", (n, k // 16), codes.tobytes())
        self.scalar(f"{path}.weight_scale_2", scale)
        if input_scale is not None:
            self.scalar(f"{path}.input_scale", input_scale)

    def fp8(self, path: str, n: int, k: int) -> None:
        self.tensors[f"{path}.weight"] = ("F8_E4M3", (n, k), self.random.integers(0x20, 0x7F, n * k, dtype=np.uint8).tobytes())
        self.scalar(f"{path}.weight_scale", 0.01)
        self.scalar(f"{path}.input_scale", 0.02)

    def scalar(self, name: str, value: float) -> None:
        self.tensors[name] = ("F32", (), struct.pack("<f", value))

    def _modelopt(self) -> tuple[dict, dict]:
        """`quantization_config` and hf_quant_config.json as ModelOpt writes them."""
        algorithm = "MIXED_PRECISION" if self.layers else "NVFP4"
        flat = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": self.ignore}
        nested = {"quant_algo": algorithm, "kv_cache_quant_algo": self.kv_algo, "exclude_modules": self.ignore}
        if self.layers:
            sized = {
                name: {"quant_algo": how} | ({"group_size": 16} if "NVFP4" in how else {}) for name, how in self.layers.items()
            }
            flat, nested = flat | {"quantized_layers": sized}, nested | {"quantized_layers": sized}
        else:
            group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
            flat, nested = flat | {"config_groups": {"group_0": group}}, nested | {"group_size": 16}
        if self.kv_algo:
            flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return flat, {"producer": {"name": "modelopt"}, "quantization": nested}

    def _compressed_tensors(self) -> dict:
        """`quantization_config` as llm-compressor writes it."""
        fp4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True, "dynamic": False}
        fp8 = {"num_bits": 8, "type": "float", "group_size": None, "strategy": "tensor", "symmetric": True, "dynamic": False}
        groups = {}
        for index, (targets, how) in enumerate(self.groups):
            weights = fp8 if how == "FP8" else fp4
            inputs = None if how.startswith("W4A16") else weights | {"dynamic": "local"}
            groups[f"group_{index}"] = {"targets": targets, "weights": weights, "input_activations": inputs}
        shape = "nvfp4-pack-quantized" if len(self.groups) == 1 else "mixed-precision"
        return {
            "quant_method": "compressed-tensors",
            "format": shape,
            "config_groups": groups,
            "ignore": self.ignore,
            "kv_cache_scheme": fp8 | {"dynamic": self.kv_algo == "FP8 dynamic"} if self.kv_algo else None,
            "quantization_status": "compressed",
        }

    def write(self, directory: Path, shards: int = 2) -> Path:
        """Write config, quantisation files, shards and index."""
        directory.mkdir(parents=True, exist_ok=True)
        config = dict(self.config)
        if self.groups:
            config["quantization_config"] = self._compressed_tensors()
        elif self.ignore is not None:
            config["quantization_config"], hf_quant_config = self._modelopt()
            if self.hf_quant:
                (directory / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
        (directory / "config.json").write_text(json.dumps(config))
        names = sorted(self.tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            mine = names[shard::shards]
            write_safetensors(directory / file, {name: self.tensors[name] for name in mine})
            weight_map |= dict.fromkeys(mine, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return directory


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def attention(model: Synthetic, prefix: str, fp4: bool) -> None:
    put = model.fp4 if fp4 else model.bf16
    for leaf, n in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
        put(f"{prefix}.self_attn.{leaf}", n, HIDDEN)
    put(f"{prefix}.self_attn.o_proj", HIDDEN, 128)
    model.vector(f"{prefix}.input_layernorm.weight", HIDDEN)


def mlp(
    model: Synthetic, prefix: str, fp4: bool, names: Iterable[str] = ("gate_proj", "up_proj", "down_proj"), scale: float = 0.01
) -> None:
    gate, up, down = names
    kwargs = {"scale": scale} if fp4 else {}
    put = model.fp4 if fp4 else model.bf16
    put(f"{prefix}.{gate}", INTER, HIDDEN, **kwargs)
    put(f"{prefix}.{up}", INTER, HIDDEN, **kwargs)
    put(f"{prefix}.{down}", HIDDEN, INTER)


def ends(model: Synthetic, prefix: str = "model") -> None:
    model.bf16(f"{prefix}.embed_tokens", 256, HIDDEN)
    model.vector(f"{prefix}.norm.weight", HIDDEN)
    model.bf16("lm_head", 256, HIDDEN)


def llama() -> Synthetic:
    """Dense, everything but lm_head in FP4, FP8 KV cache with its scales."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
    model = Synthetic(config | heads, ["lm_head"], kv_algo="FP8")
    ends(model)
    for layer in range(LAYERS):
        attention(model, f"model.layers.{layer}", fp4=True)
        mlp(model, f"model.layers.{layer}.mlp", fp4=True)
        model.scalar(f"model.layers.{layer}.self_attn.k_proj.k_scale", 1.0)
        model.scalar(f"model.layers.{layer}.self_attn.v_proj.v_scale", 1.0)
    return model


def phi() -> Synthetic:
    """Projections stored fused; attention of the first layer excluded under its split names."""
    config = {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
    split = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    model = Synthetic(config, ["lm_head", *split], hf_quant=False)
    ends(model)
    for layer in range(LAYERS):
        (model.bf16 if layer == 0 else model.fp4)(f"model.layers.{layer}.self_attn.qkv_proj", 256, HIDDEN)
        model.fp4(f"model.layers.{layer}.self_attn.o_proj", HIDDEN, 128)
        model.fp4(f"model.layers.{layer}.mlp.gate_up_proj", 2 * INTER, HIDDEN)
        model.fp4(f"model.layers.{layer}.mlp.down_proj", HIDDEN, INTER)
    return model


def mixtral() -> Synthetic:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "hidden_size": HIDDEN,
    }
    model = Synthetic(config, ["lm_head", "*block_sparse_moe.gate", "*self_attn*"])
    ends(model)
    for layer in range(LAYERS):
        attention(model, f"model.layers.{layer}", fp4=False)
        moe = f"model.layers.{layer}.block_sparse_moe"
        model.bf16(f"{moe}.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            mlp(model, f"{moe}.experts.{expert}", True, ("w1", "w3", "w2"), scale=0.01 + 0.001 * expert)
    return model


def qwen3_moe() -> Synthetic:
    """Attention and experts in FP4; router listed layer by layer."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": HIDDEN}
    model = Synthetic(config, ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS))])
    ends(model)
    for layer in range(LAYERS):
        attention(model, f"model.layers.{layer}", fp4=True)
        model.vector(f"model.layers.{layer}.self_attn.q_norm.weight", 32)
        model.bf16(f"model.layers.{layer}.mlp.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            mlp(model, f"model.layers.{layer}.mlp.experts.{expert}", fp4=True)
    return model


def deepseek() -> Synthetic:
    """MLA in bf16, a dense first layer, shared experts, and an unquantised MTP layer beyond num_hidden_layers."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
    }
    model = Synthetic(config | {"num_nextn_predict_layers": 1}, ["lm_head", "*self_attn*", "*mlp.gate", f"model.layers.{LAYERS}*"])
    ends(model)
    for layer in range(LAYERS + 1):
        prefix, fp4 = f"model.layers.{layer}", layer < LAYERS
        for leaf, n in (("q_a_proj", 64), ("q_b_proj", 128), ("kv_a_proj_with_mqa", 48), ("kv_b_proj", 128), ("o_proj", HIDDEN)):
            model.bf16(f"{prefix}.self_attn.{leaf}", n, HIDDEN)
        if layer == 0:
            mlp(model, f"{prefix}.mlp", fp4)
            continue
        model.bf16(f"{prefix}.mlp.gate", EXPERTS, HIDDEN)
        model.vector(f"{prefix}.mlp.gate.e_score_correction_bias", EXPERTS, "F32")
        mlp(model, f"{prefix}.mlp.shared_experts", fp4)
        for expert in range(EXPERTS):
            mlp(model, f"{prefix}.mlp.experts.{expert}", fp4)
    model.bf16(f"model.layers.{LAYERS}.eh_proj", HIDDEN, 2 * HIDDEN)
    return model


def qwen3_5() -> Synthetic:
    """As Qwen3.5-397B-A17B-NVFP4: only routed experts are FP4; linear attention, shared expert, vision tower and MTP are not."""
    text = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": HIDDEN, "mtp_num_hidden_layers": 1}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    root = "model.language_model"
    per_layer = ("linear_attn*", "self_attn*", "mlp.gate", "mlp.shared_expert*")
    ignore = [f"{root}.layers.{layer}.{module}" for layer in range(LAYERS) for module in per_layer]
    model = Synthetic(config, ["lm_head", "model.visual*", "mtp*", *ignore])
    ends(model, root)
    for layer in range(LAYERS + 1):
        prefix = f"{root}.layers.{layer}" if layer < LAYERS else "mtp.layers.0"
        if layer == 0:
            for leaf, n in (("in_proj_qkv", 128), ("in_proj_z", 64), ("in_proj_b", 4), ("in_proj_a", 4), ("out_proj", HIDDEN)):
                model.bf16(f"{prefix}.linear_attn.{leaf}", n, HIDDEN)
        else:
            attention(model, prefix, fp4=False)
        model.bf16(f"{prefix}.mlp.gate", EXPERTS, HIDDEN)
        model.bf16(f"{prefix}.mlp.shared_expert_gate", 1, HIDDEN)
        mlp(model, f"{prefix}.mlp.shared_expert", fp4=False)
        for expert in range(EXPERTS):
            mlp(model, f"{prefix}.mlp.experts.{expert}", fp4=layer < LAYERS, scale=0.01 + 0.001 * expert)
    model.bf16("mtp.fc", HIDDEN, 2 * HIDDEN)
    model.vector("mtp.norm.weight", HIDDEN)  # the embedding is the model's
    model.bf16("model.visual.blocks.0.attn.qkv", 96, 32)
    return model


def _in_llm_compressors_names(ours: Synthetic, ignore: list[str], groups: list[tuple[list[str], str]]) -> Synthetic:
    """nvfp4-pack-quantized, where global scales have shape [1]."""
    names = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    model = Synthetic(ours.config, ignore, groups)
    for name, (dtype, shape, raw) in ours.tensors.items():
        path, _, leaf = name.rpartition(".")
        is_fp4 = f"{path}.weight_scale_2" in ours.tensors
        leaf = "weight_packed" if dtype == "U8" else names.get(leaf, leaf) if is_fp4 else leaf
        model.tensors[f"{path}.{leaf}"] = (dtype, shape or (1,), raw)
    return model


def compressed_tensors() -> Synthetic:
    """The dense model as llm-compressor writes it: the class Linear is the target."""
    return _in_llm_compressors_names(llama(), ["lm_head"], [(["Linear"], "NVFP4")])


def compressed_weight_only() -> Synthetic:
    """Weights alone in FP4, so no input scales; patterns and a suffix leave the first layer's attention alone."""
    model = _in_llm_compressors_names(
        llama(), ["lm_head", "re:.*layers\\.0\\.self_attn\\.[qkv]_proj$", "0.self_attn.o_proj"], [(["Linear"], "W4A16_NVFP4")]
    )
    for name in [name for name in model.tensors if name.endswith("input_global_scale")]:
        del model.tensors[name]
    for leaf, n in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", HIDDEN)):
        _replace(model, f"model.layers.0.self_attn.{leaf}", model.bf16, n)
    return model


def _replace(model: Synthetic, path: str, put, n: int) -> None:
    for name in [name for name in model.tensors if name.startswith(f"{path}.") and not name.endswith(("k_scale", "v_scale"))]:
        del model.tensors[name]
    put(path, n, HIDDEN)


def compressed_moe() -> Synthetic:
    """Experts in FP4 by a pattern, attention in FP8 by another; llm-compressor lists parents in `ignore`, which says nothing."""
    model = _in_llm_compressors_names(
        qwen3_moe(),
        ["lm_head", "re:.*mlp\\.gate$", "model.layers.0.mlp.experts.0", "Qwen3MoeRMSNorm"],
        [(["re:.*mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$"], "NVFP4"), (["re:.*self_attn\\.(q|k|v|o)_proj$"], "FP8")],
    )
    for layer in range(LAYERS):
        for leaf, n in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", HIDDEN)):
            _replace(model, f"model.layers.{layer}.self_attn.{leaf}", model.fp8, n)
    return model


def mixed() -> Synthetic:
    """ModelOpt MIXED_PRECISION: attention in FP8, experts in NVFP4, those of the last layer weight-only, o_proj in bf16."""
    ours = qwen3_moe()
    model = Synthetic(ours.config, ["lm_head", "*.mlp.gate"], tensors=ours.tensors)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for leaf, n in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            _replace(model, f"{prefix}.self_attn.{leaf}", model.fp8, n)
            model.layers[f"{prefix}.self_attn.{leaf}"] = "FP8"
        _replace(model, f"{prefix}.self_attn.o_proj", model.bf16, HIDDEN)
        how = "W4A16_NVFP4" if layer == LAYERS - 1 else "NVFP4"
        for expert in range(EXPERTS):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                model.layers[f"{prefix}.mlp.experts.{expert}.{leaf}"] = how
                if how == "W4A16_NVFP4":
                    del model.tensors[f"{prefix}.mlp.experts.{expert}.{leaf}.input_scale"]
    return model


def unquantised() -> Synthetic:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": HIDDEN}
    model = Synthetic(config, None)
    ends(model)
    attention(model, "model.layers.0", fp4=False)
    mlp(model, "model.layers.0.mlp", fp4=False)
    return model


_ALL = (llama, phi, mixtral, qwen3_moe, deepseek, qwen3_5, mixed, unquantised)
_COMPRESSED = (compressed_tensors, compressed_weight_only, compressed_moe)
FAMILIES = {make.__name__: make for make in (*_ALL, *_COMPRESSED)}
