"""The judge against stub servers: right ones pass over many seeds, each way of being wrong is told by its name."""

import time

import numpy as np
import pytest
import requests

from nvfp4lab.errors import LabError
from nvfp4lab.records import WrongKind
from nvfp4lab.server import quality
from nvfp4lab.server import quality_client as client
from nvfp4lab.server.quality_canary import Canary
from quality_stub import Arm, World, serving, world


def noisy(w: World, noise: float, seed: int = 1) -> np.ndarray:
    return w.logits + noise * np.random.default_rng(seed).normal(size=w.logits.shape)


def judged(arm: Arm, w: World, concurrency: int = 4):
    with serving(arm) as url:
        return quality.judge(url, w.reference, w.floor, concurrency)


def asking(arm: Arm):
    def generate(_url: str, input_ids: list[int], tokens: int, **_extra) -> dict:
        return arm.reply({"input_ids": input_ids, "sampling_params": {"max_new_tokens": tokens}})

    return generate


def number(finding, name: str):
    return next(number for number in finding.numbers if number.name == name)


def test_an_arm_as_good_as_ideal_weights_passes_and_its_numbers_say_so() -> None:
    w = world(0)
    finding = judged(Arm(w, noisy(w, 0.3)), w)
    assert finding.kind is None and finding.reason == ""
    assert number(finding, "unsound_positions").value == 0
    assert number(finding, "same_answer_twice").value == 1.0 and number(finding, "same_answer_at_concurrency").value == 1.0
    ours, floor = number(finding, "kl_prefill"), number(finding, "floor_kl_prefill")
    assert 0 < ours.low < ours.value < ours.high
    assert ours.value == pytest.approx(floor.value, rel=0.5)
    agreement, ideal = number(finding, "top1_agreement_prefill"), number(finding, "floor_top1_agreement_prefill")
    assert agreement.low < ideal.high and ideal.low < agreement.high and agreement.n == 240
    assert number(finding, "length_over_reference").value == 0


@pytest.mark.parametrize("noise", [0.3, 0.36])
def test_no_false_alarm_over_seeds(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as much loss again as the floor (0.36 against 0.3, squared) is still within the margin."""
    for seed in range(12):
        w = world(seed)
        arm = Arm(w, noisy(w, noise, seed + 100))
        monkeypatch.setattr(client, "_generate", asking(arm))  # no sockets: twelve servers in seconds
        answers = quality.ask("", w.reference, 1)
        assert quality.judge_answers(w.reference, w.floor, answers, 1).kind is None, seed


def test_perturbed_distribution_is_degraded() -> None:
    w = world(3)
    finding = judged(Arm(w, noisy(w, 0.8)), w)
    assert finding.kind is WrongKind.DEGRADED
    assert "KL" in finding.reason or "top-1" in finding.reason
    assert min(finding.details["p_values"].values()) < quality.ALPHA / 8


def test_bf16_arm_is_judged_against_arithmetic_not_against_zero() -> None:
    w = world(4, floor_noise=0.02)
    assert judged(Arm(w, noisy(w, 0.02)), w).kind is None
    assert judged(Arm(w, noisy(w, 0.1)), w).kind is WrongKind.DEGRADED


def test_too_few_prompts_are_said_to_prove_nothing() -> None:
    w = world(3, items=6)
    finding = judged(Arm(w, noisy(w, 0.8)), w)
    assert finding.kind is None and "too few to prove" in finding.reason


def test_wrong_under_concurrency_alone_is_found() -> None:
    w = world(5)
    good, bad = Arm(w, noisy(w, 0.3)), Arm(w, noisy(w, 1.5))
    arm = Arm(w, good.logits)
    barrier_free = arm.reply

    def reply(body: dict) -> dict:
        arm.logits = bad.logits if arm.in_flight > 1 else good.logits
        time.sleep(0.003)  # so that requests overlap
        return barrier_free(body)

    arm.reply = reply
    with serving(arm) as url:
        finding = quality.judge(url, w.reference, w.floor, 8)
    assert finding.kind is WrongKind.DEGRADED
    assert finding.reason.startswith("concurrent")
    assert finding.details["p_values"]["prefill: KL"] > 0.01
    assert number(finding, "same_answer_at_concurrency").value < 1


def test_null_logprobs_are_nan() -> None:
    w = world(6)

    def spoil(reply: dict, _: int) -> None:
        if len(reply["meta_info"]["output_top_logprobs"]) > 3:
            reply["meta_info"]["output_top_logprobs"][3][0][0] = None

    finding = judged(Arm(w, noisy(w, 0.3), spoil), w)
    assert finding.kind is WrongKind.NAN and number(finding, "unsound_positions").value == 3 * len(w.reference.items)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logprobs_are_nan(value: float) -> None:
    w = world(7, items=8)

    def spoil(reply: dict, _: int) -> None:
        if reply["meta_info"]["input_top_logprobs"][-1]:
            reply["meta_info"]["input_top_logprobs"][-1][0][0] = value

    assert judged(Arm(w, noisy(w, 0.3), spoil), w).kind is WrongKind.NAN


def test_run_of_token_zero_is_garbage() -> None:
    w = world(8)

    def spoil(reply: dict, _: int) -> None:
        if reply["meta_info"]["input_token_logprobs"][0][1] == 1003:
            for entry in reply["meta_info"]["output_token_logprobs"][-5:]:
                entry[1] = 0

    finding = judged(Arm(w, noisy(w, 0.3), spoil), w)
    assert finding.kind is WrongKind.GARBAGE and "token id 0" in finding.reason and finding.reason.startswith("1 of")


def test_replacement_characters_need_more_than_one_answer() -> None:
    w = world(9)

    def spoiling(share: int):
        def spoil(reply: dict, _: int) -> None:
            if reply["meta_info"]["input_token_logprobs"][0][1] % share == 0:
                reply["text"] = "an \ufffd\ufffd answer"

        return spoil

    assert judged(Arm(w, noisy(w, 0.3), spoiling(24)), w).kind is None
    finding = judged(Arm(w, noisy(w, 0.3), spoiling(2)), w)
    assert finding.kind is WrongKind.GARBAGE and "U+FFFD" in finding.reason


def test_nonsense_and_absence_are_not_verdicts() -> None:
    w = world(10, items=6)

    def spoil(reply: dict, _: int) -> None:
        del reply["meta_info"]["output_token_logprobs"]

    with pytest.raises(LabError, match="no log-probabilities"):
        judged(Arm(w, w.logits, spoil), w)

    def other_tokens(reply: dict, _: int) -> None:
        for entry in reply["meta_info"]["input_token_logprobs"]:
            entry[1] += 1

    with pytest.raises(LabError, match="not the answer"):
        judged(Arm(w, w.logits, other_tokens), w)
    with serving(Arm(w, w.logits)) as url:
        pass
    with pytest.raises(requests.RequestException):
        quality.judge(url, w.reference, w.floor, 2)


def test_canary_sings_for_a_sound_server_and_not_for_a_broken_one() -> None:
    w = world(11, items=24, lead=10.0)
    canary = Canary.of(w.reference, w.floor, count=3)
    assert 1 <= len(canary.prompts) <= 3 and all(len(prompt.expected_ids) >= 2 for prompt in canary.prompts)
    for seed in range(5):
        with serving(Arm(w, noisy(w, 0.1, seed))) as url:
            assert canary.check(url) is None
    with serving(Arm(w, np.roll(w.logits, 1, axis=-1))) as url:
        fault = canary.check(url)
        assert fault.kind is WrongKind.GARBAGE and "must be" in fault.what

    def nulls(reply: dict, _: int) -> None:
        reply["meta_info"]["output_top_logprobs"][0][0][0] = None

    with serving(Arm(w, w.logits, nulls)) as url:
        fault = canary.check(url)
        assert fault.kind is WrongKind.NAN and "non-finite" in fault.what
    assert "p" in canary.check(url).what  # the server is gone: said, not raised


def test_canary_of_an_unsure_model_is_refused() -> None:
    w = world(12, items=4)
    rows = tuple(tuple({token: -1.0 - 0.01 * rank for rank, token in enumerate(row)} for row in item) for item in w.floor.rows)
    floor = quality.Floor("flat", w.floor.kl_nats, w.floor.agrees, rows)
    with pytest.raises(LabError, match="certain"):
        Canary.of(w.reference, floor)
