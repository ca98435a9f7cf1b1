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


def load(concurrency, value, **changes):
    details = {"concurrency": concurrency, "input_tokens": 256, "output_tokens": 64}
    numbers = speed(value, 0.9 * value, 1.1 * value)
    return evidence("arm:a", stage="load", numbers=numbers, details=details, **changes)


def test_loads_of_one_arm_are_compared_at_their_own_concurrency():
    """The two ledgers end with another concurrency each: what is compared is 8 with 8 and 32 with 32."""
    found = compare([load(8, 100), load(32, 300)], [load(32, 300), load(8, 200)])
    assert [(change.subject, change.what) for change in found.changes] == [("arm:a [concurrency 8, 256+64 tokens]", "output_tok_s")]


def test_a_timed_case_and_the_same_untimed_are_told_apart():
    """A narrow kernel is asked the same probe twice; the later, untimed record must not hide that it became slower."""

    def case(is_timed, value=0.0):
        numbers = speed(value, 0.99 * value, 1.01 * value) if is_timed else ()
        return evidence("gemm:a:exact_t13:m1", stage="kernel", numbers=numbers, details={"case": {"timed": is_timed}})

    (change,) = compare([case(True, 1.0), case(False)], [case(True, 2.0), case(False)]).changes
    assert (change.subject, change.what) == ("gemm:a:exact_t13:m1 [timed]", "output_tok_s")


def test_routes_of_one_flag_are_compared_under_their_own_condition():
    def route(architecture, verdict):
        reason = "" if verdict is Verdict.OK else "raises"
        return evidence(
            "moe:auto", stage="source", verdict=verdict, reason=reason, details={"when": {"model_arch": [architecture]}}
        )

    before = [route("A", Verdict.NOT_RUN), route("B", Verdict.NOT_RUN)]
    (change,) = compare(before, [route("A", Verdict.UNSUPPORTED), route("B", Verdict.NOT_RUN)]).changes
    assert change.subject == "moe:auto [model_arch ['A']]"


def test_a_change_names_the_versions_that_differ_or_says_that_none_does(tmp_path, capsys):
    crash = {"verdict": Verdict.CRASH, "reason": "illegal memory access"}
    other = Stack(sglang="0.5.9", flashinfer="0.7.2")
    found = compare([evidence("moe:a"), evidence("moe:b")], [evidence("moe:a", **crash), evidence("moe:b", stack=other, **crash)])
    assert [change.explained_by for change in found.changes] == [(), ("flashinfer",)]
    for name, rows in (("a", [evidence("moe:a"), evidence("moe:b")]), ("b", [evidence("moe:a", **crash)])):
        Ledger(tmp_path / name / "ledger.jsonl").append(*rows)
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out
    assert "illegal memory access (no version differs)" in told
    assert "gone     kernel moe:b (cc 12.0): ok -> -\n" in told


def test_the_command(tmp_path, capsys):
    for name, verdict in (("a", Verdict.OK), ("b", Verdict.OOM)):
        reason = "" if verdict is Verdict.OK else "no memory"
        Ledger(tmp_path / name / "ledger.jsonl").append(evidence("moe:x", verdict=verdict, reason=reason))
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "ok -> oom: no memory" in capsys.readouterr().out
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["what"] == "verdict"
