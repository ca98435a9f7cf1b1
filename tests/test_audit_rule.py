"""Our reading of the ignore list against SGLang's own code, cut from an installed sglang and run without importing it."""

import ast
import functools
import importlib.util
import re
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4lab.nvfp4 import audit_rules
from nvfp4lab.nvfp4.audit_finding import Settings
from nvfp4lab.nvfp4.audit_rules import Served
from nvfp4lab.nvfp4.checkpoint import TensorInfo
from nvfp4lab.nvfp4.checkpoint_modules import FUSED, Module, is_excluded, kind_of

WANTED = {
    "utils.py": ("_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped"),
    "modelopt_quant.py": ("_compile_exclusion_pattern", "is_layer_excluded"),
}


def definitions(path: Path, wanted: tuple[str, ...]) -> str:
    """Source text of the wanted functions and annotated constants of a file."""
    text = path.read_text(encoding="utf-8")
    found = []
    for node in ast.walk(ast.parse(text)):
        name = getattr(node, "name", getattr(getattr(node, "target", None), "id", None))
        if name in wanted:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            found.append(textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])))
    return "\n\n".join(found)


def sglang_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "srt/layers/quantization"


TYPES = {name: getattr(typing, name) for name in ("Mapping", "List", "Optional", "Pattern", "Iterable", "Tuple")}


@pytest.fixture(scope="module")
def sglang_rule() -> Callable[[str, bool, list[str]], bool | None]:
    folder = sglang_folder()
    space = {"re": re, "MappingProxyType": MappingProxyType, "functools": functools, "lru_cache": functools.lru_cache} | TYPES
    for file, wanted in WANTED.items():
        exec(definitions(folder / file, wanted), space)

    def rule(served: str, is_routed: bool, patterns: list[str]) -> bool | None:
        by_glob = space["is_layer_excluded"](SimpleNamespace(exclude_modules=patterns), served)
        if is_routed:
            return by_glob
        try:
            return space["is_layer_skipped"](served, patterns) or by_glob
        except ValueError:
            return None

    return rule


SERVED = {
    "model.layers.1.self_attn.qkv_proj": tuple(f"model.layers.1.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")),
    "model.layers.1.self_attn.o_proj": ("model.layers.1.self_attn.o_proj",),
    "model.layers.12.mlp.gate_up_proj": ("model.layers.12.mlp.gate_proj", "model.layers.12.mlp.up_proj"),
    "model.layers.1.mlp.experts": (),
    "model.layers.1.mlp.shared_expert.down_proj": ("model.layers.1.mlp.shared_expert.down_proj",),
    "lm_head": ("lm_head",),
}
ENTRIES = [
    "lm_head", "*lm_head*", "*self_attn*", "model.layers.1*", "model.layers.1", "model.layers.1.self_attn", "mlp",
    "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj", "q_proj",
    "model.layers.1.self_attn.qkv_proj", "*.q_proj", "*qkv_proj", "*mlp.gate", "model.layers.1.mlp.gate", "experts",
    "mlp.experts", "*experts*", "*.experts", "model.layers.1.mlp.experts.0.gate_proj", "model.layers.12.mlp.gate_proj",
    "model.layers.12.mlp.up_proj", "up_proj", "model.layers.1.mlp.shared_expert*", "shared_expert",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(served=st.sampled_from(sorted(SERVED)), patterns=st.lists(st.sampled_from(ENTRIES), max_size=5))
def test_exclusion_rule_is_sglangs(sglang_rule, served: str, patterns: list[str]) -> None:
    theirs = sglang_rule(served, served.endswith(".experts"), patterns)
    ours = is_excluded(served, SERVED[served], served.endswith(".experts"), patterns)
    assert ours == theirs


PREFIXES = ("model.layers.1.", "model.language_model.layers.1.", "language_model.model.layers.1.")
CLASSES = {"qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear", "experts": "FusedMoE"}


def unit(path: str) -> Served:
    """One served module with its shards stored, or one expert's projections."""
    parent, _, leaf = path.rpartition(".")
    shards = tuple(f"{parent}.{shard}" for shard in FUSED.get(leaf, (leaf,))) if leaf != "experts" else ()
    stored = shards or tuple(f"{path}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    info = TensorInfo("x", "BF16", (1, 1), Path(), 0, 2)
    return Served(path, shards, tuple(Module(name, kind_of(name, None), {"weight": info}) for name in stored))


def outcome(served: Served, given: Settings) -> tuple[str | None, bool]:
    """(algorithm, whether SGLang raises)."""
    ((_, rule),) = audit_rules.rulings([served], given)
    return (None, True) if rule.raises else (rule.algorithm, False)


MODULES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts")
NAMES = (
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "self_attn.q_proj",
        "self_attn",
        "mlp",
        "experts",
        "down_proj",
        "gate_proj",
        "up_proj",
    ),
    *("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"),
    *("model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.gate_proj"),
    *("model.layers.1.mlp.up_proj", "model.layers.1.mlp.experts", "model.layers.1.mlp.experts.0.gate_proj"),
    *("re:.*self_attn.*", r"re:.*\.[qk]_proj$", r"re:.*\.[qkv]_proj$", "re:.*qkv_proj", r"re:.*mlp\.experts.*", "re:.*_proj$"),
    *(r"re:model\.layers\.1\.", "re:layers", r"re:.*experts\.\d+\.(gate|up)_proj", "re:.*(gate|up)_proj"),
)
TARGETS = (*NAMES, "Linear", "Linear", "linear", "FusedMoE", "MergedColumn", "Conv1d", "re:.*Linear")


@pytest.fixture(scope="module")
def compressed_rule() -> Callable[[Served, list[str], dict[str, str]], tuple[str | None, bool]]:
    """SGLang's answer for compressed-tensors, joined as its `get_linear_scheme` and `get_moe_scheme` do."""
    wanted = ("should_ignore_layer", "check_equal_or_regex_match", "find_matched_target", "_find_first_match")
    space = {"re": re, "MappingProxyType": MappingProxyType, "Module": object} | TYPES
    file = sglang_folder() / "compressed_tensors/utils.py"
    exec(definitions(file, (*wanted, "_is_equal_or_regex_match", "_match_fused_layer")), space)
    fused = {name: list(FUSED[name]) for name in ("qkv_proj", "gate_up_proj")}

    def one(path: str, its_class: str, ignore: list[str], targets: dict[str, str]) -> str | None:
        if space["should_ignore_layer"](path, ignore=ignore, fused_mapping=fused):
            return None
        layer = type(its_class, (), {})()
        return targets[space["find_matched_target"](path, layer, targets.keys(), fused)] if targets else None

    def rule(served: Served, ignore: list[str], targets: dict[str, str]) -> tuple[str | None, bool]:
        try:
            if not served.is_routed:
                leaf = served.path.rpartition(".")[2]
                return one(served.path, CLASSES.get(leaf, "RowParallelLinear"), ignore, targets), False
            if "Linear" in targets and "FusedMoE" not in targets:
                targets = targets | {"FusedMoE": targets["Linear"], "DeepEPMoE": targets["Linear"]}
            parts = [f"{served.path}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
            found = {one(part, "FusedMoE", ignore, targets) for part in parts}
        except ValueError:
            return None, True
        return (found.pop(), False) if len(found) == 1 else (None, True)

    return rule


@settings(max_examples=500, deadline=None)
@given(
    module=st.sampled_from(MODULES),
    ignore=st.lists(st.sampled_from(NAMES), max_size=3),
    targets=st.dictionaries(st.sampled_from(TARGETS), st.sampled_from(("NVFP4", "FP8")), max_size=4),
)
def test_ignore_and_targets_of_compressed_tensors_are_read_as_sglang_reads_them(compressed_rule, module, ignore, targets) -> None:
    served = unit(f"model.layers.1.{module}")
    ours = outcome(served, Settings("config.json", "NVFP4", 16, tuple(ignore), False, "compressed-tensors", tuple(targets.items())))
    assert ours == compressed_rule(served, ignore, targets)


@pytest.fixture(scope="module")
def mixed_rule() -> Callable[[str, dict[str, str]], tuple[str | None, bool]]:
    """SGLang's `_resolve_quant_algo` of ModelOptMixedPrecisionConfig."""
    space = dict(TYPES)
    wanted = ("_resolve_quant_algo", "_quantized_layer_prefix_candidates")
    text = definitions(sglang_folder() / "modelopt_quant.py", wanted)
    exec(text.replace("@staticmethod\n", ""), space)

    def rule(path: str, layers: dict[str, str]) -> tuple[str | None, bool]:
        config = SimpleNamespace(
            quantized_layers={name: {"quant_algo": how} for name, how in layers.items()},
            packed_modules_mapping={name: list(shards) for name, shards in FUSED.items()},
            _quantized_layer_prefix_candidates=space["_quantized_layer_prefix_candidates"],
        )
        try:
            return space["_resolve_quant_algo"](config, path), False
        except ValueError:
            return None, True

    return rule


LISTED = tuple(
    f"{prefix}{name}"
    for prefix in PREFIXES
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj", "self_attn", "mlp"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.experts", "mlp.experts.0.gate_proj", "mlp.experts.1.down_proj"),
    )
)


@settings(max_examples=500, deadline=None)
@given(
    path=st.builds(str.__add__, st.sampled_from(PREFIXES), st.sampled_from(MODULES)),
    layers=st.dictionaries(st.sampled_from(LISTED), st.sampled_from(("NVFP4", "FP8")), max_size=5),
)
def test_quantized_layers_are_read_as_sglang_reads_them(mixed_rule, path, layers) -> None:
    given_settings = Settings("config.json", "MIXED_PRECISION", None, (), False, "modelopt", tuple(layers.items()))
    assert outcome(unit(path), given_settings) == mixed_rule(path, layers)
