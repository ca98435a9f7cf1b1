"""The readers against the hand-verified key, and against invariants on versions that the key does not hold."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest

import source_tree
from nvfp4lab.source import facts as fact_io
from nvfp4lab.source import report, sglang_facts
from nvfp4lab.source.facts import Facts
from nvfp4lab.source.package import Package, resolve

pytestmark = pytest.mark.wheel

KEY = Path(__file__).with_name("data") / "facts_key.json"
VERSIONS = ("0.5.9", "0.5.12.post1", "0.5.17", "0.5.23")


def frozen(value):
    return frozenset(map(frozen, value)) if isinstance(value, list) else value


def slot(row):
    when = frozenset((name, frozen(value)) for name, value in (row.get("when") or {}).items())
    return row["sglang_version"], row["subject"], row["predicate"], when


def places(row):
    return {(place["file"], place["line"]) for place in [row, *(row.get("also") or [])]}


@pytest.fixture(scope="module")
def facts():
    return [fact for version in VERSIONS for fact in report.facts_of(resolve(version), sglang_facts.read)[0]]


@pytest.fixture(scope="module")
def key():
    return [row for row in json.loads(KEY.read_text()) if row.get("sglang_version")]


def found_and_located(row, by_slot, by_place):
    if row["match"] == "exact":
        hits = [fact for fact in by_slot[slot(row)] if frozen(fact["value"]) == frozen(row["value"])]
        return bool(hits), any(places(fact) & places(row) for fact in hits)
    hits = [fact for fact in by_place[slot(row)[:3]] if places(fact) & places(row)]
    return bool(hits), bool(hits)


def test_recall_location_and_precision_on_the_key(facts, key):
    rows = [fact.to_json() for fact in facts]
    by_slot, by_place = collections.defaultdict(list), collections.defaultdict(list)
    for row in rows:
        by_slot[slot(row)].append(row)
        by_place[slot(row)[:3]].append(row)
    answers = [found_and_located(row, by_slot, by_place) for row in key]
    missed = [row["id"] for row, (found, _) in zip(key, answers, strict=True) if not found]
    assert sum(found for found, _ in answers) / len(key) >= 0.98, missed
    assert sum(located for _, located in answers) / len(key) >= 0.95

    allowed = collections.defaultdict(set)
    for row in key:
        if row["match"] == "exact":
            allowed[slot(row)].add(frozen(row["value"]))
    judged = [row for row in rows if slot(row) in allowed]
    wrong = [row for row in judged if frozen(row["value"]) not in allowed[slot(row)]]
    assert len(judged) > 100
    assert len(wrong) / len(judged) <= 0.01, wrong


def test_the_scorer_of_the_project_says_the_same(facts, key, root, tmp_path):
    scorer = root.parent / "shared" / "truth" / "score_facts.py"
    if not scorer.exists():
        pytest.skip("the project's own scorer is not beside this checkout")
    fact_io.write_json(facts, tmp_path / "facts.json")
    (tmp_path / "key.json").write_text(json.dumps(key))
    command = [sys.executable, str(scorer), str(tmp_path / "key.json"), str(tmp_path / "facts.json")]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert float(words[1]) >= 0.98
    assert float(words[3]) >= 0.95
    assert float(words[5]) >= 0.99


@pytest.mark.parametrize("version", VERSIONS)
def test_every_fact_shows_a_line_that_is_there(facts, version):
    tree = resolve(version).tree
    lines = {}
    for fact in (fact for fact in facts if fact.version == version and fact.predicate != "not_found"):
        for place in fact.places():
            if place.file not in lines:
                lines[place.file] = tree.read(place.file).decode("utf-8", errors="replace").splitlines()
            assert lines[place.file][place.line - 1].strip() == place.evidence


@pytest.mark.parametrize("version", VERSIONS)
def test_every_choice_of_the_command_line_has_an_end(facts, version):
    """Each MoE runner that the flag offers either reaches a kernel, has its own core, or raises; none is left without a word."""
    mine = Facts(fact for fact in facts if fact.version == version)
    (choices,) = mine.query("moe_runner", "cli_choices")
    members = set(mine.query("moe_runner", "enum_values")[0].value)
    for backend in set(choices.value) & members - {"auto"}:
        subject = f"moe:{backend}:modelopt_fp4"
        ends = mine.query(subject, "final_call") + mine.query(subject, "wiring") + mine.query(subject, "raises_on")
        assert ends, subject


def test_a_changed_wheel_changes_the_answer():
    """The same version with one branch edited: a reader that knows versions instead of constructs would not see it."""
    real = resolve("0.5.17")
    member = "sglang/srt/layers/quantization/fp4_utils.py"
    text = real.tree.read(member).decode()
    old, new = 'backend = "flashinfer_cutedsl"', 'backend = "flashinfer_trtllm"'
    assert old in text
    changed = Package("sglang", real.version, "edited", source_tree.Overlay(real.tree, {member: text.replace(old, new).encode()}))
    facts = Facts(sglang_facts.read(changed))
    assert {fact.value for fact in facts.query("fp4_gemm", "auto_resolves", {"cc": "10.0"})} == {"flashinfer_trtllm"}
    assert {fact.value for fact in facts.query("fp4_gemm", "auto_resolves", {"cc": "9.0"})} == {"marlin"}


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_values_that_can_only_fail_are_found(facts, version):
    mine = Facts(fact for fact in facts if fact.version == version)
    for backend in ("cutlass", "triton", "deep_gemm", "flashinfer_mxfp4"):
        subject = f"moe:{backend}:modelopt_fp4"
        assert mine.query(subject, "raises_on", {"cc": "12.0"}), subject
        assert not mine.query(subject, "final_call"), subject


def test_the_march_2026_stack_on_an_rtx_pro_6000(facts):
    """0.5.9: CUTLASS stands inline in the quant method, TRT-LLM goes through a layer class of its own."""
    mine = Facts(fact for fact in facts if fact.version == "0.5.9")
    (cutlass,) = mine.query("moe:flashinfer_cutlass:modelopt_fp4", "wiring", {"a2a": "none", "cc": "12.0"})[:1]
    assert cutlass.value == "inline_quant_method"
    enabled = [
        fact for fact in mine.query("moe:flashinfer_cutlass", "enabled_by") if fact.file.endswith("fused_moe_triton/layer.py")
    ]
    assert [fact.value for fact in enabled] == ["enable_flashinfer_cutlass_moe"]
    (trtllm,) = mine.query("moe:flashinfer_trtllm:modelopt_fp4", "wiring", {"a2a": "none"})[:1]
    assert trtllm.value == "fused_moe_layer"
    assert "FlashInferFP4MoE" in trtllm.evidence
    calls = mine.query("moe:flashinfer_trtllm:modelopt_fp4", "final_call", {"a2a": "none"})
    assert {call.value for call in calls} == {"flashinfer.fused_moe.trtllm_fp4_block_scale_moe"}
