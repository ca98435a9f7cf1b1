"""Changes between versions: what counts as changed, moved, new or gone."""

import json
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4lab.source import diff, diff_text
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.routes_query import WORKS, Route


def fact(subject="mm_fp4:cudnn", predicate="supported_cc", value=(100, 120), file="gemm/a.py", line=1, **when) -> Fact:
    held = list(value) if isinstance(value, tuple) else value
    return Fact("flashinfer", "1", subject, predicate, held, file, line, when=when)


def route(backend: str, expected: str = WORKS, final: str = "flashinfer.mm_fp4", when: Mapping = MappingProxyType({})) -> Route:
    return Route(backend, "fp4_gemm", when, (), (), final, expected)


def test_a_value_that_changed_shows_both_sides():
    (change,) = diff.of_facts([fact(value=(100, 103))], [fact(value=(100, 103, 120), line=9)])
    assert (change.kind, change.topic) == ("changed", "gates")
    assert change.text == "mm_fp4:cudnn supported_cc: 100, 103 -> 100, 103, 120  (gemm/a.py:1 -> gemm/a.py:9)"


def test_order_of_a_list_and_line_shifts_are_no_change():
    assert diff.of_facts([fact(value=(120, 100))], [fact(value=(100, 120), line=400)]) == []


def test_another_file_with_the_same_value_has_moved():
    (change,) = diff.of_facts([fact(file="gemm/a.py")], [fact(file="gemm/new.py")])
    assert (change.kind, change.place_before, change.place_after) == ("moved", "gemm/a.py:1", "gemm/new.py:1")


def test_conditions_keep_facts_apart():
    before = [fact("moe_runner", "auto_resolves", "flashinfer_trtllm", cc_major=10)]
    after = [*before, fact("moe_runner", "auto_resolves", "flashinfer_cutlass", cc_major=12)]
    (change,) = diff.of_facts(before, after)
    assert (change.kind, change.after, change.topic) == ("added", "flashinfer_cutlass", "auto")
    assert json.loads(change.when) == {"cc_major": 12}


def test_many_checks_under_one_key_are_a_set():
    before = [fact(predicate="requires", value=text) for text in ("k % 32 == 0", "m > 0")]
    after = [fact(predicate="requires", value=text) for text in ("k % 64 == 0", "m > 0", "n % 8 == 0")]
    found = {(change.kind, change.before or change.after) for change in diff.of_facts(before, after)}
    assert found == {("removed", "k % 32 == 0"), ("added", "k % 64 == 0"), ("added", "n % 8 == 0")}


def test_routes_that_end_elsewhere_or_are_new_or_gone():
    before = [route("auto"), route("cutlass"), route("cudnn", final="a")]
    after = [route("auto"), route("marlin"), route("cudnn", expected="raises: ValueError: no", final="a")]
    found = diff.of_routes(before, after)
    assert [diff_text.route_line(change) for change in found] == [
        "--fp4-gemm-backend cutlass: flashinfer.mm_fp4 -> no such value",
        "--fp4-gemm-backend cudnn: a -> raises: ValueError: no",
        "--fp4-gemm-backend marlin: no such value -> flashinfer.mm_fp4",
    ]


def test_a_condition_is_told_in_words_and_a_long_name_may_break_at_its_dots():
    [change] = diff.of_routes([], [route("auto", final="sglang.kernels.ops.moe.marlin", when={"model_arch": ["A", "B"]})])
    assert "auto when model_arch A or B: no such value" in diff_text.route_line(change)
    [row] = diff_text.markdown_routes([change]).splitlines()[2:]
    assert "`--fp4-gemm-backend auto` when model_arch A or B" in row
    assert "sglang.<wbr>kernels.<wbr>ops.<wbr>moe.<wbr>marlin" in row


VALUES = st.one_of(
    st.text(max_size=3), st.integers(0, 3), st.booleans(), st.none(), st.lists(st.integers(0, 3), max_size=3).map(tuple)
)
FACTS = st.lists(st.builds(fact, st.sampled_from(["a", "b"]), st.sampled_from(["wiring", "requires"]), VALUES), max_size=6)


@given(FACTS, FACTS)
def test_a_version_does_not_differ_from_itself_and_sides_mirror(one, other):
    assert diff.of_facts(one, one) == []
    forth, back = diff.of_facts(one, other), diff.of_facts(other, one)
    kinds = {"added": "removed", "removed": "added", "changed": "changed", "moved": "moved"}
    assert sorted(kinds[change.kind] for change in forth) == sorted(change.kind for change in back)


def test_nothing_to_compare_is_a_usage_error():
    done = subprocess.run([sys.executable, "-m", "nvfp4lab", "changes"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "give --sglang OLD NEW" in done.stderr


@pytest.mark.wheel
def test_two_real_versions():
    command = [sys.executable, "-m", "nvfp4lab", "changes", "--flashinfer", "0.6.5", "0.6.15.post1", "--topic", "choices"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "mm_fp4 backends: cudnn, trtllm, cutlass, cute-dsl -> cudnn, trtllm, cutlass, cute-dsl, b12x" in done.stdout
