"""Every kind of planted fault is found where it was planted, alone; clean checkpoints of every naming give nothing."""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from audit_synthesis import EXPERTS, FAMILIES, HIDDEN, INTER, LAYERS, Synthetic, write_safetensors
from nvfp4lab.nvfp4.audit import audit

MOE = "model.layers.1.mlp.experts"
DENSE = "model.layers.1.mlp"


@dataclasses.dataclass(frozen=True)
class Plant:
    """A fault: in which family, what finding it must give, and how it is planted in memory (or, `on_disk`, in the files)."""

    kind: str
    family: str
    tensor: str
    change: Callable[[Synthetic], None] = lambda model: None
    on_disk: Callable[[Path], None] = lambda directory: None
    tp: int | None = None
    ep: int | None = None


def scalar(name: str, value: float) -> Callable[[Synthetic], None]:
    return lambda model: model.scalar(name, value)


def drop(*names: str) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        for name in names:
            del model.tensors[name]

    return change


def byte(name: str, index: int, value: int) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        dtype, shape, raw = model.tensors[name]
        model.tensors[name] = (dtype, shape, raw[:index] + bytes([value]) + raw[index + 1 :])

    return change


def retyped(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        size = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}[dtype]
        count = 1
        for side in shape:
            count *= side
        model.tensors[name] = (dtype, shape, b"\x3f" * (count * size))

    return change


def ignoring(*changes: str) -> Callable[[Synthetic], None]:
    """ "+name" adds an entry, "-name" removes one."""

    def change(model: Synthetic) -> None:
        for entry in changes:
            (model.ignore.append if entry[0] == "+" else model.ignore.remove)(entry[1:])

    return change


def targeting(change: Callable[[list], None]) -> Callable[[Synthetic], None]:
    """Change compressed-tensors' config groups in place."""
    return lambda model: change(model.groups)


def listing(**changes: str | None) -> Callable[[Synthetic], None]:
    """Change `quantized_layers` by the part of the name after layer 1 ("__" for a dot); None removes an entry."""

    def change(model: Synthetic) -> None:
        for name, how in changes.items():
            path = f"model.layers.1.{name.replace('__', '.')}"
            model.layers.pop(path) if how is None else model.layers.update({path: how})

    return change


def reshaped(name: str, *shape: int) -> Callable[[Synthetic], None]:
    """The same dtype in another shape."""
    return lambda model: retyped(name, model.tensors[name][0], shape)(model)


def replaced(old: str, new: str, *files: str) -> Callable[[Path], None]:
    def on_disk(directory: Path) -> None:
        for file in files or ("config.json",):
            text = (directory / file).read_text()
            assert old in text
            (directory / file).write_text(text.replace(old, new))

    return on_disk


def quantised(path: str, n: int, k: int, ignore: str | None = None) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        model.fp4(path, n, k)
        if ignore:
            model.ignore.remove(ignore)

    return change


def unquantised(path: str, n: int, k: int) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        drop(*(f"{path}.{leaf}" for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale")))(model)
        model.bf16(path, n, k)

    return change


def both(*changes: Callable[[Synthetic], None]) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        for one in changes:
            one(model)

    return change


def remove_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def remove_last_shard(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def append(directory: Path) -> None:
    """Bytes that the header does not cover: safetensors refuses such a file."""
    with (directory / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(bytes(16))


def hole(directory: Path) -> None:
    """A tensor that the header no longer names leaves a hole before the next one; refused likewise."""
    path = next(path for path in directory.glob("*.safetensors") if b'"model.embed_tokens.weight"' in path.read_bytes())
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    first = entries["model.embed_tokens.weight"]["data_offsets"][0]
    for entry in entries.values():
        if entry.get("data_offsets", [-1])[0] >= first:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    start = 8 + length + first
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length : start] + bytes(8) + raw[start:])


def cut(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


def remove_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[0].unlink()


def rewrite_header(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def on_disk(directory: Path) -> None:
        path = sorted(directory.glob("*.safetensors"))[0]
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = change(raw[8 : 8 + length])
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])

    return on_disk


def unlist(directory: Path) -> None:
    """The tensor leaves its shard, the index goes on naming it."""
    name = "model.norm.weight"
    shard = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(directory / shard, "pt") as file:
        keys = list(file.keys())
    raw = (directory / shard).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kept = {
        key: (header[key]["dtype"], tuple(header[key]["shape"]), data[slice(*header[key]["data_offsets"])])
        for key in keys
        if key != name
    }
    write_safetensors(directory / shard, kept)


def stale_shard(directory: Path) -> None:
    """A shard of an earlier export stayed behind: servers load every *.safetensors, and the last copy wins."""
    write_safetensors(directory / "model-00009-of-00009.safetensors", {"model.norm.weight": ("BF16", (128,), bytes(256))})


def edit_hf_quant(directory: Path) -> None:
    path = directory / "hf_quant_config.json"
    path.write_text(path.read_text().replace('"lm_head"', '"lm_head", "*o_proj"'))


def break_hf_quant(directory: Path) -> None:
    (directory / "hf_quant_config.json").write_text("{")


def group_size(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"group_size": 16', '"group_size": 32'))


def undeclared(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").unlink()


def declared_without_layers(directory: Path) -> None:
    """MIXED_PRECISION in both files, and no list of what is quantised how."""
    for file, keys in (("config.json", ("quantization_config",)), ("hf_quant_config.json", ("quantization",))):
        config = json.loads((directory / file).read_text())
        del config[keys[0]]["quantized_layers"]
        (directory / file).write_text(json.dumps(config))


OUT = "model.layers.1.self_attn.o_proj"
E0, E2 = f"{MOE}.0", f"{MOE}.2"
Q = "model.layers.1.self_attn.q_proj"
PLANTS = [
    Plant("global_scale_mismatch", "qwen3_moe", f"{E2}.up_proj.weight_scale_2", scalar(f"{E2}.up_proj.weight_scale_2", 0.0101)),
    Plant("global_scale_mismatch", "mixtral", "model.layers.0.block_sparse_moe.experts.1.w3.weight_scale_2",
          scalar("model.layers.0.block_sparse_moe.experts.1.w3.weight_scale_2", 0.02)),
    Plant("global_scale_mismatch", "llama", "model.layers.1.self_attn.v_proj.weight_scale_2", scalar(f"{Q}.weight_scale_2", 0.5)),
    Plant("global_scale_mismatch", "deepseek", "model.layers.1.mlp.shared_experts.up_proj.weight_scale_2",
          scalar("model.layers.1.mlp.shared_experts.gate_proj.weight_scale_2", 0.5)),
    Plant("global_scale_mismatch", "compressed_tensors", "model.layers.1.mlp.up_proj.weight_global_scale",
          scalar("model.layers.1.mlp.up_proj.weight_global_scale", 0.5)),
    Plant("input_scale_missing", "compressed_tensors", "model.layers.1.mlp.up_proj.input_scale",
          drop("model.layers.1.mlp.up_proj.input_global_scale")),
    Plant("input_scale_missing", "llama", f"{DENSE}.down_proj.input_scale", drop(f"{DENSE}.down_proj.input_scale")),
    Plant("input_scale_zero", "llama", f"{DENSE}.down_proj.input_scale", scalar(f"{DENSE}.down_proj.input_scale", 0.0)),
    Plant("input_scale_zero", "qwen3_moe", f"{E2}.down_proj.input_scale", scalar(f"{E2}.down_proj.input_scale", -1.0)),
    Plant("input_scale_nonfinite", "llama", f"{Q}.input_scale", scalar(f"{Q}.input_scale", float("nan"))),
    Plant("input_scale_nonfinite", "qwen3_moe", f"{E0}.gate_proj.input_scale", scalar(f"{E0}.gate_proj.input_scale", float("inf"))),
    Plant("global_scale_missing", "llama", f"{DENSE}.down_proj.weight_scale_2", drop(f"{DENSE}.down_proj.weight_scale_2")),
    Plant("global_scale_zero", "llama", f"{DENSE}.up_proj.weight_scale_2", scalar(f"{DENSE}.up_proj.weight_scale_2", 0.0)),
    Plant("global_scale_nonfinite", "qwen3_moe", f"{E2}.up_proj.weight_scale_2",
          scalar(f"{E2}.up_proj.weight_scale_2", float("nan"))),
    Plant("block_scale_missing", "llama", f"{DENSE}.down_proj.weight_scale", drop(f"{DENSE}.down_proj.weight_scale")),
    Plant("block_scale_zero", "llama", f"{Q}.weight_scale", byte(f"{Q}.weight_scale", 700, 0x00)),
    Plant("block_scale_zero", "qwen3_5", "model.language_model.layers.2.mlp.experts.3.down_proj.weight_scale",
          byte("model.language_model.layers.2.mlp.experts.3.down_proj.weight_scale", 0, 0x80)),
    Plant("block_scale_nan", "llama", f"{Q}.weight_scale", byte(f"{Q}.weight_scale", 1023, 0x7F)),
    Plant("block_scale_nan", "llama", f"{Q}.weight_scale", byte(f"{Q}.weight_scale", 5, 0xFF)),
    Plant("block_scale_negative", "llama", f"{Q}.weight_scale", byte(f"{Q}.weight_scale", 5, 0xB8)),
    Plant("expert_uncalibrated", "qwen3_moe", f"{E2}.up_proj.input_scale", drop(f"{E2}.up_proj.input_scale")),
    Plant("expert_uncalibrated", "qwen3_moe", f"{E2}.up_proj.input_scale", scalar(f"{E2}.up_proj.input_scale", 1.0)),
    Plant("expert_uncalibrated", "qwen3_moe", f"{E2}.up_proj.input_scale", scalar(f"{E2}.up_proj.input_scale", 1e-9)),
    Plant("ignore_mismatch", "qwen3_5", "model.language_model.layers.1.self_attn.q_proj.weight",
          ignoring("-model.language_model.layers.1.self_attn*", "+model.language_model.layers.1.self_attn.o_proj")),
    Plant("ignore_mismatch", "llama", f"{Q}.weight", ignoring(f"+{Q}")),
    Plant("ignore_mismatch", "llama", f"{DENSE}.down_proj.weight", ignoring(f"+{DENSE}.down_proj")),
    Plant("ignore_mismatch", "llama", "model.layers.1.self_attn.o_proj.weight", ignoring("+model.layers.1.self_attn.o*")),
    Plant("ignore_mismatch", "qwen3_moe", f"{E0}.down_proj.weight", ignoring("+model.layers.1.mlp.experts*")),
    Plant("ignore_unmatched", "llama", "model.layers.1.self_attn.wqkv", ignoring("+model.layers.1.self_attn.wqkv")),
    Plant("fused_mixed", "llama", f"{Q}.weight", unquantised(Q, 128, 128)),
    Plant("mtp_mismatch", "qwen3_5", "mtp.layers.0.mlp.experts.0.down_proj.weight",
          ignoring("-mtp*", "+mtp.layers.0.self_attn*", "+mtp.layers.0.mlp.shared_expert*")),
    Plant("mtp_mismatch", "deepseek", "model.layers.3.eh_proj.weight", quantised("model.layers.3.eh_proj", 128, 256)),
    Plant("lm_head_quantised", "llama", "lm_head.weight", quantised("lm_head", 256, 128)),
    Plant("lm_head_quantised", "llama", "lm_head.weight", quantised("lm_head", 256, 128, ignore="lm_head")),
    Plant("router_quantised", "qwen3_moe", f"{DENSE}.gate.weight", quantised(f"{DENSE}.gate", EXPERTS, 128)),
    Plant("router_quantised", "qwen3_moe", f"{DENSE}.gate.weight", lambda model: model.fp8(f"{DENSE}.gate", EXPERTS, 128)),
    Plant("wrong_dtype", "qwen3_moe", f"{DENSE}.gate.weight",
          lambda model: model.tensors.update({f"{DENSE}.gate.weight": ("I8", (EXPERTS, 128), bytes(EXPERTS * 128))})),
    Plant("wrong_dtype", "llama", f"{Q}.weight_scale", retyped(f"{Q}.weight_scale", "F8_E5M2", (128, 8))),
    Plant("wrong_dtype", "qwen3_moe", f"{E0}.up_proj.input_scale", retyped(f"{E0}.up_proj.input_scale", "BF16", ())),
    Plant("wrong_shape", "llama", f"{Q}.weight_scale", retyped(f"{Q}.weight_scale", "F8_E4M3", (128, 4))),
    Plant("wrong_shape", "llama", f"{Q}.input_scale", retyped(f"{Q}.input_scale", "F32", (3,))),
    Plant("wrong_shape", "qwen3_moe", f"{E0}.down_proj.weight",
          both(retyped(f"{E0}.down_proj.weight", "U8", (64, 32)), retyped(f"{E0}.down_proj.weight_scale", "F8_E4M3", (64, 4)))),
    # Unquantised tensors: by config.json, by their neighbours, by the other layers.
    Plant("wrong_shape", "llama", "model.embed_tokens.weight", reshaped("model.embed_tokens.weight", 255, 128)),
    Plant("wrong_shape", "llama", "lm_head.weight", reshaped("lm_head.weight", 256, 64)),
    Plant("wrong_shape", "llama", "model.norm.weight", reshaped("model.norm.weight", 127)),
    Plant("wrong_shape", "phi", "model.layers.0.self_attn.qkv_proj.weight",
          reshaped("model.layers.0.self_attn.qkv_proj.weight", 256, 64)),
    Plant("wrong_shape", "qwen3_moe", f"{DENSE}.gate.weight", reshaped(f"{DENSE}.gate.weight", EXPERTS + 1, 128)),
    Plant("wrong_shape", "qwen3_moe", "model.layers.1.self_attn.q_norm.weight",
          reshaped("model.layers.1.self_attn.q_norm.weight", 16)),
    Plant("wrong_shape", "mixtral", "model.layers.1.input_layernorm.weight", reshaped("model.layers.1.input_layernorm.weight", 64)),
    Plant("wrong_shape", "mixtral", "model.layers.2.self_attn.k_proj.weight",
          reshaped("model.layers.2.self_attn.k_proj.weight", 32, 128)),
    Plant("wrong_shape", "mixtral", "model.layers.2.self_attn.o_proj.weight",
          reshaped("model.layers.2.self_attn.o_proj.weight", 128, 96)),
    Plant("wrong_shape", "unquantised", "model.layers.0.mlp.up_proj.weight",
          reshaped("model.layers.0.mlp.up_proj.weight", 32, 128)),
    Plant("wrong_shape", "unquantised", "model.layers.0.mlp.down_proj.weight",
          reshaped("model.layers.0.mlp.down_proj.weight", 128, 32)),
    Plant("wrong_shape", "deepseek", "model.layers.3.self_attn.kv_b_proj.weight",
          reshaped("model.layers.3.self_attn.kv_b_proj.weight", 64, 128)),
    Plant("wrong_shape", "deepseek", "model.layers.3.mlp.experts.2.up_proj.weight",
          reshaped("model.layers.3.mlp.experts.2.up_proj.weight", 32, 128)),
    Plant("wrong_shape", "qwen3_5", "mtp.layers.0.mlp.shared_expert.gate_proj.weight",
          reshaped("mtp.layers.0.mlp.shared_expert.gate_proj.weight", 32, 128)),
    Plant("wrong_shape", "mixed", "model.layers.2.self_attn.v_proj.weight",
          reshaped("model.layers.2.self_attn.v_proj.weight", 32, 128)),
    Plant("wrong_dtype", "mixtral", "model.layers.2.self_attn.o_proj.weight",
          lambda model: model.tensors.update({"model.layers.2.self_attn.o_proj.weight": ("I8", (128, 128), bytes(128 * 128))})),
    # compressed-tensors: `ignore` with names, ends of names and patterns; `config_groups.*.targets` with classes and patterns.
    Plant("ignore_mismatch", "compressed_tensors", f"{OUT}.weight_packed", ignoring(f"+{OUT}")),
    Plant("ignore_mismatch", "compressed_tensors", f"{OUT}.weight_packed", ignoring("+1.self_attn.o_proj")),
    Plant("ignore_mismatch", "compressed_tensors", f"{OUT}.weight_packed", ignoring(r"+re:.*layers\.1\.self_attn\.o_proj")),
    Plant("ignore_mismatch", "compressed_tensors", f"{Q}.weight_packed", ignoring(f"+{Q}")),
    Plant("ignore_mismatch", "compressed_tensors", f"{Q}.weight_packed", ignoring("+model.layers.1.self_attn.qkv_proj")),
    Plant("ignore_mismatch", "compressed_weight_only", "model.layers.0.self_attn.o_proj.weight", ignoring("-0.self_attn.o_proj")),
    Plant("ignore_mismatch", "compressed_weight_only", "model.layers.0.self_attn.o_proj.weight",
          ignoring("-0.self_attn.o_proj", "+model.layers.0.self_attn")),  # a parent, which says nothing
    Plant("ignore_mismatch", "compressed_moe", "model.layers.1.mlp.experts.0.down_proj.weight_packed",
          ignoring(r"+re:.*layers\.1\.mlp\.experts")),
    Plant("ignore_unmatched", "compressed_tensors", "model.layers.1.self_attn.wqkv", ignoring("+model.layers.1.self_attn.wqkv")),
    Plant("config_invalid", "compressed_tensors", "re:*gate", ignoring("+re:*gate")),
    Plant("config_invalid", "compressed_tensors", "group_size", on_disk=replaced('"group_size": 16', '"group_size": 32')),
    Plant("config_invalid", "compressed_tensors", "config_groups", on_disk=replaced('"float"', '"int"')),
    Plant("config_invalid", "compressed_tensors", "config_groups", on_disk=replaced('"tensor_group"', '"group"')),
    Plant("target_mismatch", "compressed_moe", f"{OUT}.weight",
          targeting(lambda groups: groups[1][0].__setitem__(0, r"re:.*self_attn\.[qkv]_proj$|.*layers\.[02]\.self_attn\.o_proj"))),
    Plant("target_mismatch", "compressed_moe", f"{OUT}.weight", targeting(lambda groups: groups[0][0].append(OUT))),
    Plant("target_mismatch", "compressed_moe", "model.layers.1.mlp.experts.0.down_proj.weight_packed",
          targeting(lambda groups: groups.insert(0, ([r"re:.*layers\.1\.mlp\.experts\.0\.up_proj"], "FP8")))),
    Plant("target_unmatched", "compressed_moe", "model.layers.1.self_attn.wo",
          targeting(lambda groups: groups[1][0].append("model.layers.1.self_attn.wo"))),
    # ModelOpt MIXED_PRECISION: `quantized_layers` beside the ignore list.
    Plant("ignore_mismatch", "mixed", "model.layers.1.mlp.experts.0.down_proj.weight", ignoring("+model.layers.1.mlp.experts*")),
    Plant("ignore_mismatch", "mixed", f"{Q}.weight", ignoring(f"+{Q}")),
    Plant("target_mismatch", "mixed", f"{Q}.weight",
          listing(self_attn__q_proj=None, self_attn__k_proj=None, self_attn__v_proj=None)),
    Plant("target_mismatch", "mixed", f"{Q}.weight", listing(self_attn__q_proj="NVFP4")),
    Plant("target_mismatch", "mixed", f"{OUT}.weight", listing(self_attn__o_proj="NVFP4")),
    Plant("target_mismatch", "mixed", "model.layers.1.mlp.experts.0.down_proj.weight", listing(mlp__experts="FP8")),
    Plant("target_unmatched", "mixed", "model.layers.1.mlp.experts.9.up_proj", listing(mlp__experts__9__up_proj="NVFP4")),
    Plant("config_disagrees", "mixed", "targets", on_disk=replaced('"W4A16_NVFP4"', '"NVFP4"', "hf_quant_config.json")),
    Plant("config_invalid", "mixed", "quantized_layers", on_disk=declared_without_layers),
    Plant("fused_mixed", "mixed", f"{Q}.weight",
          lambda model: (drop(f"{Q}.weight", f"{Q}.weight_scale", f"{Q}.input_scale")(model), model.fp4(Q, 128, 128))),
    Plant("global_scale_mismatch", "mixed", f"{E2}.up_proj.weight_scale_2", scalar(f"{E2}.up_proj.weight_scale_2", 0.5)),
    Plant("expert_uncalibrated", "mixed", f"{E2}.up_proj.input_scale", drop(f"{E2}.up_proj.input_scale")),
    Plant("tp_alignment", "llama", "model.layers.0.mlp.down_proj.weight", tp=2),
    Plant("ep_alignment", "qwen3_5", "model.language_model.layers.0.mlp.experts", ep=3),
    Plant("w13_order", "qwen3_moe", "inference_moe_w13_interleaved",
          lambda model: model.config.update(inference_moe_w13_interleaved=True)),
    Plant("kv_scale_missing", "llama", "model.layers.1.self_attn",
          drop("model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale")),
    Plant("kv_scale_missing", "compressed_tensors", "model.layers.1.self_attn",
          lambda model: (setattr(model, "kv_algo", "FP8"),
                         drop("model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale")(model))),
    # As SGLang takes them: V gets K's scale, K alone missing raises, a NaN raises, a zero beside a zero means 1.0.
    Plant("kv_scale_missing", "llama", "model.layers.1.self_attn", drop("model.layers.1.self_attn.v_proj.v_scale")),
    Plant("kv_scale_missing", "llama", "model.layers.1.self_attn", drop("model.layers.1.self_attn.k_proj.k_scale")),
    Plant("kv_scale_zero", "llama", "model.layers.1.self_attn.v_proj.v_scale",
          scalar("model.layers.1.self_attn.v_proj.v_scale", 0.0)),
    Plant("kv_scale_nonfinite", "llama", "model.layers.1.self_attn.k_proj.k_scale",
          scalar("model.layers.1.self_attn.k_proj.k_scale", float("nan"))),
    Plant("tensor_missing", "qwen3_moe", f"{E2}.up_proj",
          drop(*(f"{E2}.up_proj.{leaf}" for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale")))),
    Plant("tensor_missing", "llama", f"{DENSE}.up_proj.weight", drop(f"{DENSE}.up_proj.weight")),
    Plant("tensor_missing", "llama", "layers.3", lambda model: model.config.update(num_hidden_layers=LAYERS + 1)),
    Plant("tensor_missing", "llama", "model.norm.weight", on_disk=unlist),
    # In one layer only, and the index does not know it either.
    Plant("tensor_missing", "mixtral", "model.layers.1.self_attn.o_proj", drop("model.layers.1.self_attn.o_proj.weight")),
    Plant("tensor_missing", "mixtral", "model.layers.0.block_sparse_moe.gate", drop("model.layers.0.block_sparse_moe.gate.weight")),
    Plant("tensor_missing", "llama", "model.layers.2.input_layernorm", drop("model.layers.2.input_layernorm.weight")),
    Plant("tensor_missing", "llama", "model.norm.weight", drop("model.norm.weight")),
    Plant("tensor_missing", "llama", "model.embed_tokens.weight", drop("model.embed_tokens.weight")),
    Plant("tensor_missing", "qwen3_5", "model.language_model.norm.weight", drop("model.language_model.norm.weight")),
    Plant("tensor_missing", "llama", "lm_head.weight",
          lambda model: (drop("lm_head.weight")(model), model.config.update(tie_word_embeddings=False))),
    Plant("tensor_duplicated", "llama", "model.norm.weight", on_disk=stale_shard),
    Plant("shard_missing", "llama", "model-00001-of-00002.safetensors", on_disk=remove_shard),
    Plant("shard_truncated", "llama", "model-00001-of-00002.safetensors", on_disk=cut),
    Plant("shard_truncated", "llama", "model-00001-of-00002.safetensors",
          on_disk=lambda directory: (directory / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 40)),
    Plant("shard_missing", "llama", "model-00002-of-00002.safetensors", on_disk=both(remove_index, remove_last_shard)),
    Plant("header_malformed", "llama", "model-00001-of-00002.safetensors", on_disk=append),
    Plant("header_malformed", "llama", "model.embed_tokens.weight", on_disk=hole),
    Plant("header_malformed", "llama", "model-00001-of-00002.safetensors", on_disk=rewrite_header(lambda raw: b"[" * len(raw))),
    Plant("config_malformed", "llama", "hf_quant_config.json", on_disk=break_hf_quant),
    Plant("config_disagrees", "llama", "ignore", on_disk=edit_hf_quant),
    Plant("config_invalid", "phi", "group_size", on_disk=group_size),
    Plant("quantisation_undeclared", "mixtral", "model.layers.0.block_sparse_moe.experts.0.w1", on_disk=undeclared),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.kind}-{plant.tensor.rsplit('.', 2)[-2:]}")
def test_planted_fault_is_found_where_it_is_and_nothing_else(plant: Plant, tmp_path: Path) -> None:
    model = FAMILIES[plant.family]()
    plant.change(model)
    directory = model.write(tmp_path)
    plant.on_disk(directory)
    found = audit(directory, tp=plant.tp, ep=plant.ep).findings
    assert [(finding.kind, finding.tensor) for finding in found] == [(plant.kind, plant.tensor)], "\n".join(map(str, found))
    assert found[0].hurts and found[0].fix and found[0].what


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_clean_checkpoints_give_nothing(family: str, shards: int, tmp_path: Path) -> None:
    directory = FAMILIES[family]().write(tmp_path, shards)
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:  # the synthesis itself is valid safetensors
            assert list(file.keys())
    assert audit(directory).findings == ()
    assert audit(directory, tp=1, ep=1).findings == ()


def test_a_vision_tower_needs_no_embedding_and_no_scales_of_a_cache(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.ignore.append("vision_tower*")
    for layer in range(LAYERS):
        model.bf16(f"vision_tower.layers.{layer}.self_attn.q_proj", 64, 64)
    model.vector("vision_tower.norm.weight", 64)
    assert audit(model.write(tmp_path)).findings == ()


NAMINGS = [  # what stands for `embed_tokens`, `norm` and `lm_head`; None: not stored
    ("embeddings", "norm_f", "lm_head"),
    ("embed_tokens", "final_layernorm", "lm_head"),  # Falcon-H1, Phi-2, Jamba, Zamba
    ("embed_tokens", "embedding_norm", "lm_head"),  # LFM2
    ("embed_tokens", "final_norm", "lm_head"),  # RecurrentGemma
    ("word_embeddings", "norm", "lm_head"),  # Ling
    ("tok_embeddings", "norm", "output"),  # InternLM2
    ("embed_tokens", "norm", "score"),  # a reward model
    ("embed_tokens", "norm", "embed_out"),
]


@pytest.mark.parametrize("naming", NAMINGS, ids=lambda naming: "-".join(naming))
def test_ends_of_another_naming_are_not_missed(naming: tuple[str, str, str], tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.config["tie_word_embeddings"] = False
    if naming[2] == "score":
        model.config["architectures"] = ["LlamaForSequenceClassification"]
    if naming[2] == "embed_out":
        naming = ("embed_in", *naming[1:])
    for ours, theirs in zip(("model.embed_tokens", "model.norm", "lm_head"), naming, strict=True):
        prefix = "model." if ours.startswith("model.") else ""
        model.tensors[f"{prefix}{theirs}.weight"] = model.tensors.pop(f"{ours}.weight")
    assert audit(model.write(tmp_path)).findings == ()


def test_a_draft_of_several_layers_has_no_ends_of_its_own(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.config |= {"architectures": ["DFlashDraftModel"], "tie_word_embeddings": False}
    drop("lm_head.weight", "model.embed_tokens.weight")(model)
    model.vector("model.hidden_norm.weight", HIDDEN)
    assert audit(model.write(tmp_path)).findings == ()


def test_norms_without_weights_have_none_at_the_end(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    drop(*(name for name in model.tensors if name.endswith("norm.weight")))(model)
    assert audit(model.write(tmp_path)).findings == ()


def test_a_few_layers_beside_the_model_need_no_embedding(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.vector("model.connector.layers.0.input_layernorm.weight", HIDDEN)
    model.vector("model.connector.norm.weight", HIDDEN)
    assert audit(model.write(tmp_path)).findings == ()


@pytest.mark.parametrize("tie", [None, True])
def test_a_head_that_is_tied_or_may_be_is_not_missed(tie: bool | None, tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    drop("lm_head.weight")(model)
    if tie is not None:
        model.config["tie_word_embeddings"] = tie
    assert audit(model.write(tmp_path)).findings == ()


def test_a_draft_model_takes_its_ends_from_the_model_it_drafts_for(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    model.config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    drop("lm_head.weight", "model.embed_tokens.weight", *(n for n in model.tensors if ".layers.1." in n or ".layers.2." in n))(
        model
    )
    assert audit(model.write(tmp_path)).findings == ()


def test_a_multimodal_prefix_in_quantized_layers_is_understood(tmp_path: Path) -> None:
    """SGLang looks for `model.X`, `model.language_model.X` and `language_model.model.X`; any other prefix matches nothing."""
    model = FAMILIES["mixed"]()
    named = dict(model.layers)
    model.layers = {name.replace("model.", "model.language_model.", 1): how for name, how in named.items()}
    assert audit(model.write(tmp_path / "known")).findings == ()
    model.layers = {name.replace("model.", "backbone.", 1): how for name, how in named.items()}
    found = {finding.kind for finding in audit(model.write(tmp_path / "unknown")).findings}
    assert found == {"target_mismatch", "target_unmatched"}


@pytest.mark.parametrize("how", ["FP8", "FP8 dynamic"])
def test_scales_of_the_kv_cache_by_their_older_name_or_by_none(how: str, tmp_path: Path) -> None:
    """llm-compressor wrote `k_proj.output_scale` once; a dynamic cache stores none."""
    model = FAMILIES["compressed_tensors"]()
    model.kv_algo = how
    for name in [name for name in model.tensors if name.endswith(("k_scale", "v_scale"))]:
        if how == "FP8":
            model.tensors[f"{name.rpartition('.')[0]}.output_scale"] = model.tensors[name]
        del model.tensors[name]
    assert audit(model.write(tmp_path)).findings == ()


def test_experts_at_the_default_scale_are_found_though_they_are_most(tmp_path: Path) -> None:
    model = FAMILIES["qwen3_moe"]()
    names = [f"{MOE}.{expert}.down_proj.input_scale" for expert in range(3)]
    for name in names:
        model.scalar(name, 1.0)
    found = audit(model.write(tmp_path)).findings
    assert [(finding.kind, finding.tensor) for finding in found] == [("expert_uncalibrated", name) for name in names]


def test_what_an_absent_shard_may_hold_is_not_called_missing(tmp_path: Path) -> None:
    directory = FAMILIES["qwen3_moe"]().write(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert {finding.kind for finding in audit(directory).findings} == {"shard_missing"}


def test_struct_of_synthesis_is_what_the_format_says() -> None:
    dtype, shape, raw = FAMILIES["llama"]().tensors["model.layers.0.mlp.gate_proj.weight_scale_2"]
    assert (dtype, shape, struct.unpack("<f", raw)[0]) == ("F32", (), pytest.approx(0.01))
    assert INTER % 64 == 0
