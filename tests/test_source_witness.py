"""The witness: what counts as a refusal, and how an answer is held against a reading."""

import json
import subprocess
import sys
import types

import pytest

from nvfp4lab.errors import LabError
from nvfp4lab.source import witness, witness_child
from nvfp4lab.source.routes_query import WORKS, Gate, Hop, Query, Route

FILE = "sglang/srt/layers/quantization/modelopt_quant.py"


def route(expected: str = WORKS, final: str = "flashinfer.fused_moe.cutlass_fused_moe", hops=(), gates=()) -> Route:
    return Route("triton", "moe", {}, tuple(hops), tuple(gates), final, expected)


def raising(line: int) -> Route:
    return route("raises: NotImplementedError: no", "none, it raises before", [Hop(FILE, line, "apply raises")])


def refused(line: int) -> dict:
    return {"outcome": "refused", "error": "NotImplementedError", "said": "no", "file": FILE, "line": line}


WENT_ON = {"outcome": "went on", "resolved": "triton"}
RAN = {"outcome": "went on", "runner": "marlin", "fused": "fused_experts_none_to_marlin", "ran": True}
BUILT = [Hop(FILE, 1, "builds a MoeRunner for marlin"), Hop(FILE, 2, "fused function fused_experts_none_to_marlin for (...)")]


def verdict(reading: Route, method: dict, arguments: dict = WENT_ON) -> bool | None:
    (row,) = witness.compare([reading], {"triton": {"arguments": arguments, "method": method}})
    return row.agree


def test_refusals_agree_at_the_same_line_only():
    assert verdict(raising(2715), refused(2715)) is True
    assert verdict(raising(2710), refused(2715)) is True  # the raise statement begins above the line that a traceback names
    assert verdict(route(), refused(2715)) is False
    assert verdict(raising(2715), RAN) is False


def test_two_refusals_at_different_checks_are_not_a_contradiction():
    assert verdict(raising(100), refused(2715)) is None


def test_a_check_that_the_reading_left_open_is_not_a_contradiction():
    gate = Gate("depends on requires x", "depends", FILE, 2714)
    assert verdict(route(gates=[gate]), refused(2715)) is None


def test_going_on_agrees_only_with_the_runner_that_was_read():
    assert verdict(route(hops=BUILT), RAN) is True
    assert verdict(route(hops=BUILT), RAN | {"runner": "triton"}) is False
    assert verdict(route(hops=BUILT), RAN | {"fused": "another"}) is False


def test_a_missing_package_proves_nothing():
    assert verdict(route(), {"outcome": "stopped", "error": "ImportError", "said": "no flashinfer"}) is None


def test_an_argument_rule_speaks_before_the_layers():
    assert verdict(raising(98), RAN, refused(98)) is True


def test_disagreements_come_first():
    rows = [witness.Comparison(name, "a", "b|c", agree) for name, agree in (("x", True), ("y", None), ("z", False))]
    lines = witness.markdown(rows).splitlines()
    assert ["z" in lines[2], "y" in lines[3], "x" in lines[4]] == [True, True, True]
    assert "b\\|c" in lines[2]


def test_only_a_raise_or_assert_is_a_refusal(tmp_path, monkeypatch):
    source = "def refuses(x):\n    if x:\n        raise ValueError('no')\ndef asserts(x):\n    assert not x\n"
    source += "def breaks(x):\n    a, b = []\ndef lacks(x):\n    raise ImportError('not installed')\n"
    (tmp_path / "subject.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    subject = __import__("subject")
    outcomes = {
        name: witness_child.answer(lambda name=name: getattr(subject, name)(1))
        for name in ("refuses", "asserts", "breaks", "lacks")
    }
    assert {name: said["outcome"] for name, said in outcomes.items()} == {
        "refuses": "refused",
        "asserts": "refused",
        "breaks": "stopped",
        "lacks": "stopped",
    }
    assert (outcomes["refuses"]["line"], outcomes["refuses"]["error"]) == (3, "ValueError")
    assert witness_child.answer(lambda: {"runner": None}) == {"outcome": "went on", "runner": None}


def test_another_version_than_the_one_read_is_not_asked(monkeypatch):
    router = types.SimpleNamespace(reading=types.SimpleNamespace(version="0.5.9"))
    monkeypatch.setattr(witness, "installed_version", lambda: "0.5.23")
    with pytest.raises(LabError, match=r"needs sglang 0\.5\.9 installed here; there is 0\.5\.23"):
        witness.ask(router, Query("12.0"), ["triton"])


def test_faked_gpu_is_what_torch_reports():
    code = "from nvfp4lab.source import witness_child; witness_child.fake_gpu(12, 1); import torch, json; "
    code += "print(json.dumps([torch.cuda.is_available(), torch.cuda.get_device_capability(0), torch.cuda.device_count()]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, [12, 1], 1]
