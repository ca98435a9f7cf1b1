"""Records survive a round trip, the ledger survives its writers."""

import json
import multiprocessing
from pathlib import Path

import pytest

from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict, WrongKind


def evidence(subject="moe:flashinfer_cutlass:modelopt_fp4", **changes) -> Evidence:
    values = {
        "stage": "kernel",
        "subject": subject,
        "target": Target("12.0", present=True, name="RTX PRO 6000"),
        "stack": Stack(sglang="0.5.9", flashinfer="0.6.5"),
        "verdict": Verdict.OK,
        "repro": "nvfp4lab kernels params/rtx_pro_6000.yaml",
    }
    return Evidence(**values | changes)


def test_round_trip_keeps_everything():
    record = evidence(
        verdict=Verdict.WRONG,
        kind=WrongKind.NAN,
        reason="row 3 is NaN",
        numbers=(Number("time_ms", 1.5, "ms", 1.4, 1.6, 30),),
        artefacts=("logs/a.txt",),
        details={"place": {"row": 3}},
    )
    assert Evidence.from_json(record.to_json()) == record


def test_non_finite_numbers_leave_valid_json():
    line = evidence(numbers=(Number("kl", float("nan"), "nat"),)).to_json()
    assert json.loads(line)["numbers"][0]["value"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": Verdict.WRONG, "reason": "no kind"},
        {"verdict": Verdict.OK, "kind": WrongKind.NAN},
        {"verdict": Verdict.NOT_RUN},
        {"verdict": Verdict.UNSUPPORTED},
    ],
)
def test_a_verdict_without_its_kind_or_reason_is_refused(changes):
    with pytest.raises(ValueError, match="moe:flashinfer_cutlass"):
        evidence(**changes)


def test_a_torn_last_line_is_tolerated_and_the_next_record_is_whole(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(evidence("moe:a"))
    with ledger.path.open("a") as file:
        file.write(evidence("moe:torn").to_json()[:40])
    assert [record.subject for record in ledger] == ["moe:a"]
    ledger.append(evidence("moe:b"))
    assert [record.subject for record in ledger] == ["moe:a", "moe:b"]
    assert ledger.damaged() == 1


def _write_many(path, name):
    for number in range(50):
        Ledger(path).append(evidence(f"moe:{name}:{number}", details={"filler": "x" * 5000}))


def test_many_writers_never_mix_their_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert Ledger(path).damaged() == 0
    assert len({record.subject for record in Ledger(path)}) == 200


def test_secrets_do_not_reach_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(evidence(repro="HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz sglang serve", details={"api_key": "abc"}))
    text = ledger.path.read_text()
    assert "hf_abc" not in text
    assert '"api_key": "[redacted]"' in text


def test_a_full_disk_is_an_error_not_a_lost_record(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "ledger.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"[Nn]o space"):
        Ledger(tmp_path / "ledger.jsonl").append(evidence())
