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

from nvfp4lab.nvfp4.checkpoint_modules import is_excluded

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


@pytest.fixture(scope="module")
def sglang_rule() -> Callable[[str, bool, list[str]], bool | None]:
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("sglang is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt/layers/quantization"
    space = {"re": re, "MappingProxyType": MappingProxyType, "functools": functools, "lru_cache": functools.lru_cache}
    space |= {name: getattr(typing, name) for name in ("Mapping", "List", "Optional", "Pattern")}
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
