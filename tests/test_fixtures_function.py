"""Fixture models compute the function that they claim: padding and experts change nothing, NVFP4 is what the codec says."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nvfp4lab import cli
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import codec, fixtures, fixtures_moe, fixtures_nvfp4, fixtures_write, padding
from nvfp4lab.nvfp4.audit import audit

TEXTS = ("The capital of France is", "def fib(n):\n    if n < 2:", "12 + 30 = 42, 15 + 7 =")
OLD, NEW = padding.Widths(24, 3, 1, 8), padding.Widths(40, 6, 2, 8)


@pytest.fixture(scope="module")
def built() -> Callable[[str], Path]:
    """A fixture model from the lab's cache; where it is not there yet, the first takes 20 s, each other a few."""
    pytest.importorskip("gguf")
    return fixtures.folder_of


def logits_of(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval(), AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        return torch.cat([model(tokenizer(text, return_tensors="pt").input_ids).logits[0].float() for text in TEXTS])


def rms(difference: torch.Tensor) -> float:
    return difference.pow(2).mean().sqrt().item()


@pytest.fixture(scope="module")
def original(built) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: logits_of(built("smol-bf16"), dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("name", ["smol-padded-bf16", "smol-moe-bf16"])
def test_padded_and_expert_models_equal_the_original_within_bf16_rounding(name: str, built, original) -> None:
    """The yardstick is measured: what bf16 arithmetic itself does to the original's logits.

    In fp32 arithmetic only the norm weights' second rounding is left, which must be far below that.
    """
    bf16_rounding = rms(original[torch.bfloat16] - original[torch.float32])
    exact = logits_of(built(name), torch.float32)
    assert rms(exact - original[torch.float32]) < bf16_rounding / 2
    assert torch.equal(exact.argmax(-1), original[torch.float32].argmax(-1))
    in_bf16 = logits_of(built(name), torch.bfloat16)
    assert rms(in_bf16 - original[torch.float32]) < 1.5 * bf16_rounding
    assert bf16_rounding < 0.05 * original[torch.float32].std().item()  # the yardstick is no rubber band


def random_llama(layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q_proj": (24, 24), "k_proj": (8, 24), "v_proj": (8, 24), "o_proj": (24, 24)}
    mlp = {"gate_proj": (48, 24), "up_proj": (48, 24), "down_proj": (24, 48)}
    tensors = {"model.embed_tokens.weight": torch.randn(64, 24, generator=generator), "model.norm.weight": torch.ones(24)}
    for layer in range(layers):
        for part, shapes in (("self_attn", sizes), ("mlp", mlp)):
            for leaf, shape in shapes.items():
                tensors[f"model.layers.{layer}.{part}.{leaf}.weight"] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(24, generator=generator)
    return tensors


def run_llama(tensors: dict[str, torch.Tensor], widths: padding.Widths, eps: float) -> torch.Tensor:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=widths.hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads, head_dim=widths.head_dim, rms_norm_eps=eps, tie_word_embeddings=True,
        sliding_window=None,
    )  # fmt: skip
    model = MistralForCausalLM(config).double().eval()
    model.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, strict=False)
    with torch.inference_mode():
        return model(torch.arange(12)[None]).logits


def test_padding_is_exact_in_real_arithmetic() -> None:
    tensors = {name: tensor.double() for name, tensor in random_llama().items()}
    eps = 0.05  # large: an epsilon that is not adapted must show
    want = run_llama(tensors, OLD, eps)
    padded = padding.pad_llama(tensors, OLD, NEW)  # RMSNorm computes in fp32, hence not 1e-12
    assert torch.allclose(
        run_llama(padded, NEW, padding.padded_eps(eps, OLD, NEW)), want, rtol=0, atol=1e-4
    )  # RMSNorm computes in fp32
    assert not torch.allclose(run_llama(padded, NEW, eps), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("new", [padding.Widths(40, 5, 2, 8), padding.Widths(16, 3, 1, 8), padding.Widths(40, 3, 1, 16)])
def test_padding_that_would_change_the_function_is_refused(new: padding.Widths) -> None:
    with pytest.raises(LabError):
        padding.pad_llama(random_llama(), OLD, new)


def test_padding_refuses_what_it_does_not_know() -> None:
    with pytest.raises(LabError, match="q_norm"):
        padding.pad_llama({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, OLD, NEW)


def expert_output(tensors: dict[str, torch.Tensor], x: torch.Tensor, gate: int, up: int, down: int) -> torch.Tensor:
    def of(expert: int, leaf: str) -> torch.Tensor:
        return tensors[f"model.layers.0.mlp.experts.{expert}.{leaf}_proj.weight"].T

    return (torch.nn.functional.silu(x @ of(gate, "gate")) * (x @ of(up, "up"))) @ of(down, "down")


def test_experts_agree_and_any_mixture_of_their_parts_does_not() -> None:
    shape = fixtures_moe.MoeShape()
    dense = {name: tensor.double() for name, tensor in random_llama().items()}
    moe = fixtures_moe.to_moe(dense, 2, shape)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = [expert_output(moe, x, e, e, e) for e in range(shape.experts)]
    assert all(torch.allclose(own[0], other) for other in own)
    for parts in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 2, 5)):
        assert (expert_output(moe, x, *parts) - own[0]).norm() > 0.5 * own[0].norm()
    scales = {moe[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].abs().max().item() for e in range(shape.experts)}
    assert len(scales) == 7  # an alpha taken from another expert is off by a power of two


def test_nvfp4_fixture_is_sound_and_decodes_to_its_dequantised_twin(built) -> None:
    nvfp4, twin = built("smol-nvfp4"), built("smol-nvfp4-dequantised")
    report = audit(nvfp4, tp=1)
    assert report.findings == () and report.summary.fp4["dense"] == 210
    stored, decoded, padded = (load_file(path / "model.safetensors") for path in (nvfp4, twin, built("smol-padded-bf16")))
    for path in ("model.layers.0.self_attn.k_proj", "model.layers.17.mlp.down_proj"):
        parts = codec.NVFP4Tensor(*(stored[f"{path}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")))
        assert torch.equal(codec.dequantize(parts), decoded[f"{path}.weight"])
        error = rms(decoded[f"{path}.weight"].float() - padded[f"{path}.weight"].float()) / rms(padded[f"{path}.weight"].float())
        assert 0.05 < error < 0.15  # E2M1 with a scale per 16: about a tenth
    shared = [stored[f"model.layers.3.self_attn.{leaf}_proj.weight_scale_2"] for leaf in "qkv"]
    assert shared[0] == shared[1] == shared[2] and shared[0].shape == ()
    config = json.loads((nvfp4 / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt" and (nvfp4 / "chat_template.jinja").exists()


def test_expert_input_scales_are_those_of_the_dense_calibration() -> None:
    shape, generator, mlp = fixtures_moe.MoeShape(), torch.Generator().manual_seed(0), "model.layers.0.mlp"
    dense = {f"{mlp}.gate_proj": torch.rand(24, generator=generator), f"{mlp}.down_proj": torch.rand(48, generator=generator)}
    amax = fixtures_nvfp4.moe_amax(dense, 1, shape)
    largest = dense[f"{mlp}.down_proj"][fixtures_moe.routed_neurons(48, shape)].max()
    for expert in range(shape.experts):
        order = fixtures_moe.neuron_order(0, expert, 48, shape)
        ours = amax[f"{mlp}.experts.{expert}.down_proj"]
        assert torch.equal(ours, dense[f"{mlp}.down_proj"][order] * 2.0 ** fixtures_moe.up_exponent(expert))
        assert math.log2((ours.max() / largest).item()) == fixtures_moe.up_exponent(expert)


def test_command_prints_the_folder_and_reuses_it(built, capsys: pytest.CaptureFixture[str]) -> None:
    directory = built("smol-bf16")
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    assert cli.main(["fixture", "smol-bf16", str(directory)]) == 0
    assert capsys.readouterr().out.strip() == str(directory)
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert cli.main(["fixture", "smol-bf17", str(directory)]) == 1
    assert "smol-bf16" in capsys.readouterr().err


def test_build_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fails(part: Path) -> None:
        (part / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fixtures_write.build_once(target, "r", fails)
    assert not target.exists() and not list(tmp_path.glob(".model.part-*"))
    calls = []

    def fills(part: Path) -> None:
        calls.append(part)
        (part / "a.txt").write_text("whole")

    assert fixtures_write.build_once(target, "r", fills) == target == fixtures_write.build_once(target, "r", fills)
    assert len(calls) == 1
    (target / "a.txt").write_text("truncat")  # a size that the manifest does not name
    (tmp_path / ".model.part-killed").mkdir()
    fixtures_write.build_once(target, "r", fills)
    assert len(calls) == 2 and (target / "a.txt").read_text() == "whole" and not list(tmp_path.glob(".model.part-*"))
    fixtures_write.build_once(target, "another recipe", fills)
    assert len(calls) == 3


def test_a_folder_with_other_content_is_left_alone(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "thesis.txt").write_text("mine")
    with pytest.raises(LabError, match="not a fixture"):
        fixtures_write.build_once(ours, "r", lambda part: None)
    assert (ours / "thesis.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [ours], "a refusal leaves no lock file"


def test_a_checkpoint_that_the_cache_has_is_copied(tmp_path: Path, monkeypatch, built) -> None:
    cached = built("smol-bf16")
    monkeypatch.setattr(fixtures, "_fill", lambda *_: pytest.fail("built again"))
    copy = fixtures.build("smol-bf16", tmp_path / "copy")
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in cached.iterdir())
    for name in ("model.safetensors", "tokenizer.json", fixtures_write.MANIFEST_NAME):
        assert (copy / name).read_bytes() == (cached / name).read_bytes()
        assert (copy / name).stat().st_ino != (cached / name).stat().st_ino, "writing into a copy must not change the cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole build of recipe "r"."""
    return fixtures_write.build_once(tmp_path / "source", "r", lambda part: (part / "a.txt").write_text("whole"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_only_a_whole_build_of_the_same_recipe_is_copied(source: Path, target: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:  # nothing of a gigabyte is moved to be thrown away
        patched.setattr(fixtures_write.shutil, "copyfile", lambda *_, **__: pytest.fail("copied"))
        assert not fixtures_write.copied(source, target, "another recipe")
        assert not fixtures_write.copied(source.parent / "nowhere", target, "r")
    assert fixtures_write.copied(source, target, "r") and (target / "a.txt").read_text() == "whole"
    (target / "a.txt").unlink()
    (target / fixtures_write.MANIFEST_NAME).unlink()
    (source / "a.txt").write_text("truncat")
    assert not fixtures_write.copied(source, target, "r") and list(target.iterdir()) == []


def test_a_read_only_cache_gives_a_folder_that_can_be_written(source: Path, target: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    assert fixtures_write.copied(source, target, "r")
    assert all(path.stat().st_mode & 0o200 for path in (target, *target.iterdir()))
    source.chmod(0o755)


@pytest.mark.parametrize("how", ["cut", "rebuilt"])
def test_a_source_that_changes_while_it_is_copied_is_not_taken(source: Path, target: Path, monkeypatch, how: str) -> None:
    copyfile = fixtures_write.shutil.copyfile

    def disturbed(given: Path, to: Path):
        copyfile(given, to)
        if how == "cut" and to.name == "a.txt":
            to.write_text("hal")
        if how == "rebuilt" and to.name == fixtures_write.MANIFEST_NAME:  # the same sizes, other weights
            fixtures_write.build_once(source, "s", lambda part: (part / "a.txt").write_text("WHOLE"))

    monkeypatch.setattr(fixtures_write.shutil, "copyfile", disturbed)
    assert not fixtures_write.copied(source, target, "r") and list(target.iterdir()) == []


def test_moe_nvfp4_keeps_all_but_routed_experts_in_bf16(built) -> None:
    directory = built("smol-moe-nvfp4")
    report = audit(directory, tp=1, ep=1)
    assert report.findings == ()
    assert report.summary.fp4 == {"dense": 0, "shared expert": 0, "routed expert": 720, "MTP": 0}
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.shared_expert.up_proj.weight").get_dtype() == "BF16"
        assert file.get_slice("model.layers.0.mlp.experts.7.up_proj.weight").get_shape() == [512, 384]
