"""Facts of a miniature SGLang: derived from constructs, never by importing, and `not found` where there is nothing."""

import json
import subprocess
import sys

import pytest

import source_tree
from nvfp4lab import cli
from nvfp4lab.source import facts as fact_io
from nvfp4lab.source import report, sglang_facts
from nvfp4lab.source.facts import Fact, Facts, Place, holds
from nvfp4lab.source.package import resolve

UTILS = "sglang/srt/layers/quantization/fp4_utils.py"


def facts_of(root, members=None):
    return Facts(sglang_facts.read(resolve(source_tree.write(root, members))))


def values(facts, subject, predicate, **when):
    return {json.dumps(dict(fact.when), sort_keys=True): fact.value for fact in facts.query(subject, predicate, when or None)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))


def test_auto_is_resolved_per_capability(tmp_path):
    found = values(facts_of(tmp_path / "t"), "fp4_gemm", "auto_resolves")
    assert found['{"cc_major": 10}'] == "flashinfer_cutedsl"
    assert found['{"cc": ">=80,<100"}'] == "marlin"
    assert found['{"cc_major": [11, 12]}'] == "flashinfer_cudnn"


def test_the_reading_follows_the_construct_not_the_version(tmp_path):
    changed = source_tree.FP4_UTILS.replace('backend = "flashinfer_cutedsl"', 'backend = "flashinfer_cudnn"').replace(
        "\n\n", "\n\n\n"
    )
    before, after = facts_of(tmp_path / "a"), facts_of(tmp_path / "b", source_tree.MEMBERS | {UTILS: changed})
    (old,) = before.query("fp4_gemm", "auto_resolves", {"cc": "10.0"})
    (new,) = after.query("fp4_gemm", "auto_resolves", {"cc": "10.0"})
    assert (old.value, new.value) == ("flashinfer_cutedsl", "flashinfer_cudnn")
    assert new.line > old.line
    assert new.evidence == 'backend = "flashinfer_cudnn"'


def test_an_enum_that_moved_to_another_module_is_found_there(tmp_path):
    members = dict(source_tree.MEMBERS)
    members["sglang/srt/new/home_of_fp4.py"] = members.pop(UTILS)
    (fact,) = facts_of(tmp_path / "t", members).query("fp4_gemm", "enum_values")
    assert fact.file == "sglang/srt/new/home_of_fp4.py"
    assert set(fact.value) == {"auto", "flashinfer_cudnn", "flashinfer_cutedsl", "marlin"}


def test_an_enum_that_is_gone_is_not_guessed(tmp_path):
    members = source_tree.MEMBERS | {UTILS: source_tree.FP4_UTILS.replace("Fp4GemmRunnerBackend", "DenseBackend")}
    facts = facts_of(tmp_path / "t", members)
    assert not facts.query("fp4_gemm", "enum_values")
    assert not facts.query("fp4_gemm", "auto_resolves")
    (missing,) = [fact for fact in facts.query("fp4_gemm", "not_found") if fact.value == "enum_values"]
    assert "class Fp4GemmRunnerBackend" in missing.note
    assert "all modules" in missing.note


def test_server_arguments_and_checks(tmp_path):
    facts = facts_of(tmp_path / "t")
    assert values(facts, "fp4_gemm", "cli_choices") == {"{}": ["auto", "flashinfer_cudnn", "marlin"]}
    assert values(facts, "fp4_gemm", "cli_flag") == {"{}": "--fp4-gemm-backend"}
    assert values(facts, "fp4_gemm", "default") == {"{}": "auto"}
    assert values(facts, "moe:flashinfer_cutlass", "allowed_quantization") == {"{}": ["modelopt_fp4", None]}


def test_runner_rules_say_all_their_conditions(tmp_path):
    found = values(facts_of(tmp_path / "t"), "moe_runner", "auto_resolves")
    assert found == {'{"a2a": "none", "cc_major": [10, 11, 12], "quantization_flag": "modelopt_fp4"}': "flashinfer_cutlass"}


def test_annotated_fields_in_the_newer_style(tmp_path):
    fields = (
        "class Kernel:\n    fp4_gemm_runner_backend: A[\n        str,\n        Arg(\n            help='x',\n"
        "            cli_name='--fp4',\n            choices=['auto', 'marlin'],\n        ),\n    ] = 'auto'\n"
    )
    server_args = source_tree.SERVER_ARGS.replace('    fp4_gemm_runner_backend: str = "auto"\n', "").split("    @staticmethod")[0]
    members = source_tree.MEMBERS | {"sglang/srt/server_args.py": server_args, "sglang/srt/fields/exec_.py": fields}
    facts = facts_of(tmp_path / "t", members)
    assert values(facts, "fp4_gemm", "cli_choices") == {"{}": ["auto", "marlin"]}
    assert values(facts, "fp4_gemm", "cli_flag") == {"{}": "--fp4"}
    (default,) = facts.query("fp4_gemm", "default")
    assert (default.value, default.line) == ("auto", 9)


def test_a_member_that_does_not_parse_is_reported_and_the_rest_is_read(tmp_path, capsys):
    members = source_tree.MEMBERS | {"sglang/srt/broken.py": "def broken(:\n"}
    source_tree.write(tmp_path / "t", members)
    out = tmp_path / "facts.json"
    assert cli.main(["facts", "--sglang", str(tmp_path / "t"), "--json", str(out)]) == 0
    said = capsys.readouterr().err
    assert "not parsable, left out: sglang/srt/broken.py" in said
    assert "1 not parsable" in said
    assert "from the cache" not in said
    assert cli.main(["facts", "--sglang", str(tmp_path / "t"), "--json", str(out)]) == 0
    assert "from the cache" in capsys.readouterr().err
    assert any(row["predicate"] == "enum_values" for row in json.loads(out.read_text()))


def test_in_a_large_tree_the_smallest_members_are_still_checked(tmp_path):
    large = {"sglang/srt/large.py": "# a line\n" * (1 << 18)}
    root = source_tree.write(tmp_path / "t", source_tree.MEMBERS | large | {"sglang/srt/broken.py": "def broken(:\n"})
    _, cost = report.facts_of(resolve(root), sglang_facts.read)
    assert list(cost.unparsable) == ["sglang/srt/broken.py"]
    assert cost.lines_parsed < 1 << 18  # the large member, which says nothing about FP4, was not parsed


def test_what_was_not_parsed_is_told_and_can_be_asked_for(tmp_path, capsys):
    """A large broken member that no reader asks for: parsing 46 MB of SGLang for it would double the time of a reading."""
    large = {"sglang/srt/large.py": "# a line\n" * (1 << 18) + "def broken(:\n"}
    source_tree.write(tmp_path / "t", source_tree.MEMBERS | large)
    command = ["facts", "--sglang", str(tmp_path / "t"), "--json", str(tmp_path / "facts.json")]
    assert cli.main(command) == 0
    assert "0 not parsable, 2 MiB searched and not parsed" in capsys.readouterr().err
    for again in (["--parse-all"], []):  # what was learned is kept
        assert cli.main([*command, *again]) == 0
        said = capsys.readouterr().err
        assert "1 not parsable\n" in said and "not parsable, left out: sglang/srt/large.py" in said


def test_nothing_of_the_target_is_ever_imported_or_run(tmp_path):
    """Every module of the tree destroys a marker when it is imported; so does running anything in it."""
    marker = tmp_path / "marker"
    marker.touch()
    poison = f"import pathlib; pathlib.Path({str(marker)!r}).unlink(missing_ok=True)\n"
    root = source_tree.write(tmp_path / "t", {name: poison + text for name, text in source_tree.MEMBERS.items()})
    command = [sys.executable, "-m", "nvfp4lab", "facts", "--sglang", str(root), "--json", str(tmp_path / "facts.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "facts.json").read_text())) > 10
    assert marker.exists()
    subprocess.run([sys.executable, "-c", "import sglang.srt.utils.common"], cwd=root, check=True)
    assert not marker.exists()  # the marker does die on import, so the test could have failed


def test_the_cache_answers_for_the_same_content_only(tmp_path):
    root = source_tree.write(tmp_path / "t")
    first, cost = report.facts_of(resolve(root), sglang_facts.read)
    again, kept = report.facts_of(resolve(root), sglang_facts.read)
    assert (cost.from_cache, kept.from_cache) == (False, True)
    assert again == first
    (root / UTILS).write_text(source_tree.FP4_UTILS.replace('MARLIN = "marlin"', 'MARLIN = "marlin2"'))
    changed, cost = report.facts_of(resolve(root), sglang_facts.read)
    assert not cost.from_cache
    assert changed != first


def test_a_damaged_cache_is_read_afresh(tmp_path):
    root = source_tree.write(tmp_path / "t")
    first, _ = report.facts_of(resolve(root), sglang_facts.read)
    (kept,) = (tmp_path / "cache" / "facts").glob("*.json")
    kept.write_text(kept.read_text()[:100])
    again, cost = report.facts_of(resolve(root), sglang_facts.read)
    assert not cost.from_cache
    assert again == first


@pytest.mark.parametrize(
    ("when", "question", "answer"),
    [
        ({}, {}, True),
        ({"cc_major": 12}, {"cc": "12.1"}, True),
        ({"cc_major": [10, 12]}, {"cc": "11.0"}, False),
        ({"cc": ">=80,<100"}, {"cc": "8.9"}, True),
        ({"cc": ">=80,<100"}, {"cc": "10.0"}, False),
        ({"cc_major": "<10"}, {"cc": "9.0"}, True),
        ({"cc_major_not_in": [10, 12]}, {"cc": "11.0"}, True),
        ({"cc_major_not": 10}, {"cc": "10.3"}, False),
        ({"cc": [100]}, {"cc": "10.3"}, False),
        ({"cc": [120, 121]}, {"cc": "12.1"}, True),
        ({"cc_not_in": [103, 120]}, {"cc": "12.0"}, False),
        ({"cc_not_in": [103, 120]}, {"cc": "10.0"}, True),
        ({"cc_not_in": [103, 120]}, {}, None),
        ({"a2a": ["none", "flashinfer"]}, {"a2a": "none"}, True),
        ({"a2a": "deepep", "env": "X"}, {"a2a": "none"}, False),
        ({"a2a": "none", "env": "X"}, {"a2a": "none"}, None),
    ],
)
def test_conditions_hold_fail_or_stay_open(when, question, answer):
    assert holds(when, question) is answer


def test_facts_survive_json_and_unknown_files_are_said(tmp_path):
    fact = Fact(
        "sglang", "1", "a:b", "p", [1, None], "f.py", 3, {"cc_major": 12}, "x = 1", (Place("g.py", 4, "y"),), "C.m", "n", True
    )
    path = tmp_path / "facts.json"
    fact_io.write_json([fact], path)
    assert list(fact_io.read_json(path)) == [fact]
    path.write_text('[{"subject": "x"}]')
    with pytest.raises(fact_io.LabError, match="not a list of facts"):
        fact_io.read_json(path)


def test_a_star_in_a_fact_answers_for_every_word():
    said = Facts(
        [
            Fact("sglang", "1", "moe:*:modelopt_fp4", "raises_on", "x", "f", 1),
            Fact("sglang", "1", "fp4_gemm:flashinfer_*:q", "r", 1, "f", 1),
        ]
    )
    assert len(said.query("moe:triton:modelopt_fp4")) == 1
    assert len(said.query("fp4_gemm:flashinfer_cudnn:q")) == 1
    assert not said.query("fp4_gemm:marlin:q")
    assert not said.query("moe:triton")


@pytest.mark.parametrize(
    ("line", "predicate", "value"),
    [
        ("Requires-Dist: flashinfer_python[cu13]==0.7.2", "requires_flashinfer", "0.7.2"),
        ("Requires-Dist: flashinfer-python (==0.6.3)", "requires_flashinfer", "0.6.3"),
        ("Requires-Dist: sgl-kernel==0.3.21", "requires_sgl_kernel", "sgl-kernel==0.3.21"),
        ("Requires-Dist: sglang_kernel==0.4.5", "requires_sgl_kernel", "sglang-kernel==0.4.5"),
        ('Requires-Dist: sglang-kernel==9; extra == "tracing"', "requires_sgl_kernel", None),
        ("Requires-Dist: flashinfer-python>=0.6", "requires_flashinfer", None),
    ],
)
def test_pins_are_read_from_the_metadata_line(tmp_path, line, predicate, value):
    metadata = {"sglang-1.dist-info/METADATA": f"Name: sglang\nVersion: 1\n{line}\n"}
    found = facts_of(tmp_path / "t", source_tree.MEMBERS | metadata).query("package", predicate)
    assert [fact.value for fact in found] == ([] if value is None else [value])
    assert all(fact.line == 3 and fact.file.endswith("METADATA") for fact in found)


def test_environment_variables_of_the_path_with_their_declared_default(tmp_path):
    changed = source_tree.FP4_UTILS + "\nFAST = envs.SGLANG_FP4_FAST.get()\n"
    declared = {
        "sglang/srt/environ.py": "class Envs:\n    SGLANG_FP4_FAST = EnvBool(False)  # fp4\n    SGLANG_OTHER = EnvBool(True)\n"
    }
    facts = facts_of(tmp_path / "t", source_tree.MEMBERS | {UTILS: changed} | declared)
    assert values(facts, "env:SGLANG_FP4_FAST", "read_at") == {"{}": [UTILS]}
    assert values(facts, "env:SGLANG_FP4_FAST", "default") == {"{}": False}
    assert not facts.query("env:SGLANG_OTHER")
