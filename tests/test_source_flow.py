"""Ordered reading of functions: dead branches are not read, open ones are, and every event says what it depends on."""

import source_tree
from nvfp4lab.source.index import Index
from nvfp4lab.source.package import resolve
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import UNKNOWN, Scenario, Unknown


def flow_of(tmp_path, body, env=None, **flags):
    member = "sglang/srt/moe_case.py"
    source_tree.write(tmp_path, source_tree.MEMBERS | {member: body})
    reading = Reading(Index(resolve(tmp_path)))
    definition = reading.index.module(member).definitions["case"]
    return reading.flow(definition, Scenario.of((12, 0), **flags), env)


def calls(flow):
    return [(event.dotted, [guard.text for guard in event.guards]) for event in flow.of_kind("call")]


def test_a_decided_branch_hides_the_other(tmp_path):
    body = "def case(a):\n    if a.moe_runner_backend == 'auto':\n        one()\n    else:\n        two()\n"
    assert calls(flow_of(tmp_path, body, moe_runner_backend="auto")) == [("one", [])]
    assert calls(flow_of(tmp_path, body, moe_runner_backend="marlin")) == [("two", [])]


def test_an_open_branch_keeps_both_and_says_on_what_it_depends(tmp_path):
    body = "def case(a):\n    if a.x:\n        one()\n    else:\n        two()\n    three()\n"
    assert calls(flow_of(tmp_path, body)) == [("one", ["a.x"]), ("two", ["not (a.x)"]), ("three", [])]


def test_a_branch_that_leaves_conditions_what_follows(tmp_path):
    body = "def case(a):\n    if a.x:\n        return one()\n    two()\n    raise ValueError\n    three()\n"
    flow = flow_of(tmp_path, body)
    assert calls(flow) == [("one", ["a.x"]), ("two", ["not (a.x)"])]
    assert [event.dotted for event in flow.of_kind("raise")] == ["ValueError"]


def test_names_that_differ_after_an_open_branch_are_open(tmp_path):
    body = "def case(a):\n    x = y = 1\n    if a.z:\n        x = 2\n        y = 1\n    return\n"
    flow = flow_of(tmp_path, body)
    assert isinstance(flow.env["x"], Unknown)
    assert flow.env["y"] == 1


def test_loop_variables_are_open_and_so_is_what_they_touch(tmp_path):
    flow = flow_of(
        tmp_path, "def case(a):\n    x = 1\n    for i in a.rows:\n        x = 2\n        if x == 2:\n            one()\n"
    )
    assert isinstance(flow.env["x"], Unknown)
    assert [name for name, _ in calls(flow)] == ["one"]


def test_only_undecided_conjuncts_remain(tmp_path):
    body = "def case(a):\n    if a.moe_runner_backend == 'auto' and a.other:\n        one()\n"
    (event,) = flow_of(tmp_path, body, moe_runner_backend="auto").of_kind("call")
    assert [part.attr for part in event.guards[0].undecided] == ["other"]


def test_local_imports_and_returned_imports_name_the_callee(tmp_path):
    body = (
        "def _lazy():\n    from flashinfer.fused_moe import cutlass_fused_moe\n    return cutlass_fused_moe, None\n"
        "def case(a):\n    kernel, _ = _lazy()\n    from flashinfer import mm_fp4 as dense\n    dense(a)\n    return kernel(a)\n"
    )
    names = [name for name, _ in calls(flow_of(tmp_path, body))]
    assert names[-2:] == ["flashinfer.mm_fp4", "flashinfer.fused_moe.cutlass_fused_moe"]


def test_imports_succeed_unless_told_otherwise(tmp_path):
    body = (
        "try:\n    from flashinfer import mm_fp4\n    available = True\n"
        "except ImportError:\n    available = False\n    mm_fp4 = None\n"
        "def case(a):\n    if not available or mm_fp4 is None:\n        raise RuntimeError\n    mm_fp4(a)\n"
    )
    flow = flow_of(tmp_path, body)
    assert calls(flow) == [("flashinfer.mm_fp4", [])]
    assert not list(flow.of_kind("raise"))


def test_a_default_argument_is_kept_until_the_caller_says_otherwise(tmp_path):
    body = "def case(a, routed=False):\n    if routed:\n        one()\n    else:\n        two()\n"
    assert calls(flow_of(tmp_path, body)) == [("two", [])]
    assert [name for name, _ in calls(flow_of(tmp_path, body, env={"routed": UNKNOWN}))] == ["one", "two"]
