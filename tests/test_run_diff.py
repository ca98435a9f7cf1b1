"""Two runs are compared by subject; only what moved beyond its interval counts."""

import json

from nvfp4lab import cli
from nvfp4lab.records import Ledger, Number, Stack, Verdict
from nvfp4lab.report.run_diff import compare
from test_records import evidence


def speed(value, low, high):
    return (Number("output_tok_s", value, "tok/s", low, high),)


def test_verdicts_numbers_and_versions():
    before = [
        evidence("moe:a", numbers=speed(100, 90, 110)),
        evidence("moe:b", numbers=speed(100, 90, 110)),
        evidence("moe:c"),
        evidence("moe:gone"),
    ]
    after = [
        evidence("moe:a", numbers=speed(105, 95, 115)),
        evidence("moe:b", numbers=speed(150, 140, 160)),
        evidence("moe:c", verdict=Verdict.CRASH, reason="illegal memory access"),
        evidence("moe:new", stack=Stack(sglang="0.5.23", flashinfer="0.7.2")),
    ]
    found = compare(before, after)
    assert [(change.subject, change.what) for change in found.changes] == [
        ("moe:b", "output_tok_s"),
        ("moe:c", "verdict"),
        ("moe:gone", "gone"),
        ("moe:new", "new"),
    ]
    assert found.versions == {"sglang": ("0.5.9", "0.5.23"), "flashinfer": ("0.6.5", "0.7.2")}


def test_the_command(tmp_path, capsys):
    for name, verdict in (("a", Verdict.OK), ("b", Verdict.OOM)):
        reason = "" if verdict is Verdict.OK else "no memory"
        Ledger(tmp_path / name / "ledger.jsonl").append(evidence("moe:x", verdict=verdict, reason=reason))
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "ok -> oom: no memory" in capsys.readouterr().out
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["what"] == "verdict"
