"""The audit beyond single faults: counts and moot flags, hostile files, bounded memory, the command."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit_synthesis import EXPERTS, FAMILIES, LAYERS, llama, qwen3_moe, write_safetensors
from nvfp4lab import cli
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import audit_config
from nvfp4lab.nvfp4.audit import audit, moot_flags, summarise
from nvfp4lab.nvfp4.checkpoint import open_checkpoint, read_header
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, names_path

MOE_LAYER = 3 * EXPERTS


def test_layers_are_counted_by_kind(tmp_path: Path) -> None:
    summary = audit(FAMILIES["deepseek"]().write(tmp_path)).summary
    sparse = LAYERS - 1
    assert summary.fp4 == {
        LayerKind.DENSE: 3,
        LayerKind.SHARED_EXPERT: 3 * sparse,
        LayerKind.ROUTED_EXPERT: MOE_LAYER * sparse,
        LayerKind.MTP: 0,
    }
    assert summary.other[LayerKind.MTP] == 5 + 3 + MOE_LAYER + 1
    assert summary.other[LayerKind.DENSE] == 5 * LAYERS


@pytest.mark.parametrize(
    ("family", "moot"),
    [
        ("llama", {"--moe-runner-backend", "--moe-a2a-backend", "--ep-size", "--speculative-algorithm NEXTN"}),
        ("qwen3_moe", {"--speculative-algorithm NEXTN"}),
        ("qwen3_5", {"--fp4-gemm-backend"}),
        ("deepseek", set()),
        ("mixtral", {"--moe-runner-backend", "--moe-a2a-backend", "--ep-size", "--speculative-algorithm NEXTN"}),
    ],
)
def test_a_flag_that_touches_no_layer_is_moot(family: str, moot: set[str], tmp_path: Path) -> None:
    summary = audit(FAMILIES[family]().write(tmp_path)).summary
    assert set(moot_flags(summary)) == moot
    assert summarise(tmp_path) == summary


def test_hub_cache_layout_and_absent_blob(tmp_path: Path) -> None:
    snapshot = llama().write(tmp_path / "models--x--y" / "snapshots" / "abc")
    (tmp_path / "models--x--y" / "refs").mkdir()
    (tmp_path / "models--x--y" / "refs" / "main").write_text("abc\n")
    assert audit(tmp_path / "models--x--y").findings == ()
    shard = sorted(snapshot.glob("*.safetensors"))[1]
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs" / "never-downloaded")
    assert [finding.kind for finding in audit(tmp_path / "models--x--y").findings] == ["shard_missing"]


def test_index_cannot_lead_outside_the_folder(tmp_path: Path) -> None:
    model = llama().write(tmp_path / "model")
    write_safetensors(tmp_path / "outside.safetensors", {"x.weight": ("U8", (8,), bytes(8))})
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["x.weight"] = "../outside.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(model)
    assert "x.weight" not in checkpoint.tensors
    assert [defect.kind for defect in checkpoint.defects] == ["shard_missing"]


def test_a_pickle_is_named_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    bomb = tmp_path / "pytorch_model.bin"
    bomb.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR.")
    with pytest.raises(LabError, match="pickle and is not opened"):
        audit(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [None, {}], ids=["no folder", "no config"])
def test_nothing_to_audit_is_said(content: dict | None, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no such folder|no config\.json"):
        audit(tmp_path / "absent" if content is None else tmp_path)


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=6))
def test_no_header_makes_the_reader_raise(cut: int, flips: list[tuple[int, int]], tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    write_safetensors(path, {"a.weight": ("BF16", (4, 4), bytes(32)), "b.weight": ("F32", (), bytes(4))})
    raw = bytearray(path.read_bytes())
    for index, value in flips:
        raw[index % len(raw)] = value
    path.write_bytes(raw[:cut] if cut < 300 else raw)
    tensors, defects = read_header(path)
    size = path.stat().st_size
    assert defects or all(info.stop <= size and info.is_consistent for info in tensors.values())


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A sparse file of 6 GB with 64 MB of block scales is audited in the memory of a few chunks."""
    k, n = 65536, 16384
    parts = [
        ("weight", "U8", [n, k // 2]),
        ("weight_scale", "F8_E4M3", [n, k // 16]),
        ("weight_scale_2", "F32", []),
        ("input_scale", "F32", []),
    ]
    header, end = {}, 0
    for layer in range(2):
        for leaf, dtype, shape in parts:
            size = 4 if not shape else shape[0] * shape[1]
            header[f"model.layers.{layer}.mlp.down_proj.{leaf}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    quantisation = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "group_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "quantization_config": quantisation}))
    tracemalloc.start()
    report = audit(tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {finding.kind for finding in report.findings} == {"block_scale_zero", "global_scale_zero", "input_scale_zero"}
    assert report.read_bytes == 2 * (n * k // 16 + 8)
    assert peak_bytes < 48 << 20 < report.read_bytes


@settings(max_examples=200, deadline=None)
@given(
    entry=st.lists(st.sampled_from(("model", "layers", "0", "1", "mlp", "up_proj")), min_size=1, max_size=4),
    paths=st.lists(st.lists(st.sampled_from(("model", "layers", "0", "1", "mlp", "up_proj")), min_size=1, max_size=6), max_size=4),
)
def test_an_entry_is_found_as_a_run_of_parts_in_any_path(entry: list[str], paths: list[list[str]]) -> None:
    names = audit_config._Names([".".join(path) for path in paths])
    assert names.have(".".join(entry)) is any(names_path(".".join(entry), ".".join(path)) for path in paths)


def test_a_list_as_long_as_the_model_that_matches_nothing_takes_seconds() -> None:
    """A list under another prefix: 20,000 entries against 20,000 modules, each a miss."""
    leaves = [f"layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(500)]
    names = audit_config._Names([f"model.{leaf}" for leaf in leaves])
    started = time.monotonic()
    assert not any(names.have(f"backbone.{leaf}") for leaf in leaves)
    assert not any(names.have(f"model.{leaf.replace('layers.', 'layers.9')}") for leaf in leaves)
    assert time.monotonic() - started < 10


def test_command_prints_the_contract_and_exits_by_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = qwen3_moe().write(tmp_path / "clean")
    assert cli.main(["audit", str(clean), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    broken = qwen3_moe()
    broken.scalar("model.layers.1.mlp.experts.2.up_proj.weight_scale_2", 0.5)
    assert cli.main(["audit", str(broken.write(tmp_path / "broken")), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert {"kind", "tensor", "hurts", "fix"} <= finding.keys()
    assert "marlin" in finding["hurts"]
    assert cli.main(["audit", str(tmp_path / "broken")]) == 1
    text = capsys.readouterr().out
    assert "global_scale_mismatch" in text and "routed expert 36/36" in text and "1 findings" in text
    assert cli.main(["audit", str(clean), "--tp", "0"]) == 2
    assert cli.main(["audit", str(tmp_path / "nowhere"), "--json"]) == 2, "1 would say that a checkpoint has findings"


def test_a_packed_router_without_any_scale_is_found(tmp_path: Path) -> None:
    checkpoint = qwen3_moe()
    name = next(name for name in checkpoint.tensors if name.endswith(".mlp.gate.weight"))
    _, (rows, columns), content = checkpoint.tensors[name]
    checkpoint.tensors[name] = ("U8", (rows, columns // 2), content[: rows * columns // 2])
    assert ("router_quantised", name) in {
        (finding.kind, finding.tensor) for finding in audit(checkpoint.write(tmp_path / "c")).findings
    }
