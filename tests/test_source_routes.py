"""Routes on the real wheels: where each flag ends, the traps, and what source leaves open."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import source_tree
from nvfp4lab.cli import main
from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Verdict
from nvfp4lab.source import plots, routes_evidence, routes_flashinfer, routes_text, sglang_facts
from nvfp4lab.source.facts import Fact, Facts
from nvfp4lab.source.index import Index
from nvfp4lab.source.package import Package, resolve
from nvfp4lab.source.routes import Router, open_router
from nvfp4lab.source.routes_query import WORKS, Query, Route
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import Scenario


@pytest.fixture(scope="module")
def march() -> Router:
    """SGLang 0.5.9 with FlashInfer 0.6.5, as people ran it in March 2026."""
    return open_router("0.5.9", "0.6.5")


@pytest.fixture(scope="module")
def later() -> Router:
    return open_router("0.5.17", "none")


def only(routes: list[Route], op: str, backend: str) -> Route:
    return [route for route in routes if (route.op, route.backend) == (op, backend)][-1]


def test_march_moe_cutlass_is_handled_inline(march):
    route = only(march.routes(Query("12.0"), ("moe",)), "moe", "flashinfer_cutlass")
    assert (route.expected, route.final_call) == (WORKS, "flashinfer.fused_moe.cutlass_fused_moe")
    hops = {(hop.file.rsplit("/", 1)[-1], hop.line): hop.why for hop in route.hops}
    assert hops["layer.py", 212] == "enable_flashinfer_cutlass_moe is set"
    assert hops["modelopt_quant.py", 1740] == "branch taken: if self.enable_flashinfer_cutlass_moe"
    assert not any("MoeRunner" in why for why in hops.values())


def test_march_moe_trtllm_has_its_own_layer_and_a_gate_that_excludes_the_card(march):
    route = only(march.routes(Query("12.0"), ("moe",)), "moe", "flashinfer_trtllm")
    assert route.final_call == "flashinfer.fused_moe.trtllm_fp4_block_scale_moe"
    assert any(hop.why == "the MoE layer is FlashInferFP4MoE" for hop in route.hops)
    failed = {(gate.file.rsplit("/", 1)[-1], gate.line) for gate in route.gates if gate.state == "failed"}
    assert failed == {("fused_moe.py", 251), ("trtllm_fused_moe_kernel_launcher.cu", 417)}
    assert route.raises
    assert not only(march.routes(Query("10.0"), ("moe",)), "moe", "flashinfer_trtllm").raises


def test_march_dense_backends(march):
    found = {route.backend: route.expected for route in march.routes(Query("12.0"), ("fp4_gemm",))}
    assert {name for name, expected in found.items() if expected == WORKS} == {"auto", "flashinfer_cudnn", "flashinfer_cutlass"}
    assert found["flashinfer_trtllm"] == "raises: FlashInfer 0.6.5 mm_fp4:trtllm is for [100, 103] (enforced), asked is 120"


def test_march_values_that_end_elsewhere(march):
    routes = march.routes(Query("12.0"), ("moe",))
    for backend in ("deep_gemm", "triton", "flashinfer_cutedsl"):
        route = only(routes, "moe", backend)
        assert route.expected == f"silently goes elsewhere: {backend} ends in sgl_kernel.cutlass_fp4_group_mm"
        assert route.traps
    assert only(routes, "moe", "cutlass").expected == WORKS
    assert "falls to sgl_kernel.cutlass_fp4_group_mm" in only(routes, "moe", "auto").traps[0]


def test_too_old_a_gpu_is_refused_at_load(march):
    assert {route.expected for route in march.routes(Query("9.0"), ("fp4_gemm",))} == {
        "raises: ValueError: modelopt_fp4 needs capability 100 at model load, this GPU has 90"
    }


@pytest.mark.parametrize("backend", ["cutlass", "triton", "deep_gemm", "flashinfer_mxfp4"])
def test_later_values_that_can_only_fail(later, backend):
    route = only(later.routes(Query("12.0"), ("moe",)), "moe", backend)
    assert route.expected.startswith("raises: NotImplementedError")
    assert route.traps == (
        f"--moe-runner-backend {backend} is accepted by the command line, but modelopt_fp4 can only fail with it, on every GPU",
    )


def test_later_auto_unresolved_can_only_raise(later):
    route = only(later.routes(Query("12.0"), ("moe",), trapped=("auto",)), "moe", "auto")
    assert route.when == {"auto_left_unresolved": True}
    assert "can only raise: NotImplementedError" in route.traps[0]
    assert "with --quantization modelopt_fp4 on the command line it becomes flashinfer_cutlass" in route.traps[0]


def test_later_auto_is_resolved_once_the_flag_is_given(later):
    found = [route for route in later.routes(Query("12.0", flag_given=True), ("moe",), trapped=()) if route.backend == "auto"]
    assert [(route.final_call, dict(route.when)) for route in found] == [("flashinfer.fused_moe.cutlass_fused_moe", {})]


def test_later_auto_on_b200_depends_on_the_model(later):
    asked = Query("10.0", model_arch="Qwen3_5MoeForConditionalGeneration")
    found = [route.final_call for route in later.routes(asked, ("moe",), trapped=()) if route.backend == "auto"]
    assert found == ["flashinfer.fused_moe.trtllm_fp4_block_scale_moe"]


def test_later_argument_rule_refuses_a_layout(later):
    route = only(later.routes(Query("12.0", tp=4, ep=2), ("moe",), trapped=()), "moe", "flashinfer_cutlass")
    assert route.expected == "raises: AssertionError: requires view.ep_size in [1, self.tp_size]"
    assert (route.hops[-1].file, route.hops[-1].line) == ("sglang/srt/server_args.py", 6519)


def test_later_runner_is_wired_by_a_registered_function(later):
    route = only(later.routes(Query("12.0"), ("moe",), trapped=()), "moe", "flashinfer_cutlass")
    wired = next(hop for hop in route.hops if hop.why.startswith("fused function"))
    assert wired.file == "sglang/srt/layers/moe/moe_runner/flashinfer_cutlass.py"
    assert "registered by the import of sglang.srt.layers.moe.moe_runner.flashinfer_cutlass on this route" in wired.why


def test_what_source_does_not_decide_is_kept(later):
    route = only(later.routes(Query("12.0"), ("moe",), trapped=()), "moe", "flashinfer_trtllm")
    other = [gate for gate in route.gates if "use_routed_topk" in gate.text and "then flashinfer" in gate.text]
    assert [gate.state for gate in other] == ["depends"]
    assert all(gate.text.startswith("depends on ") for gate in route.gates if gate.state == "depends")


def test_ungated_experts_change_a_gate(later):
    gated, ungated = (
        only(later.routes(Query("12.0", gated=gated), ("moe",), trapped=()), "moe", "flashinfer_cutlass") for gated in (True, False)
    )
    assert gated.gates != ungated.gates


@pytest.mark.parametrize("wrong", [{"cc": "cpu"}, {"cc": "blackwell"}, {"cc": "12.0", "tp": 4, "ep": 3}, {"cc": "12.0", "tp": 0}])
def test_a_question_without_sense_is_a_usage_error(wrong):
    with pytest.raises(LabError) as caught:
        Query(**wrong)
    assert caught.value.exit_code == 2


def test_unknown_quantisation_names_those_there_are(later):
    with pytest.raises(LabError, match=r"no quantisation 'modelopt_fp5'; this version has: .*modelopt_fp4"):
        later.routes(Query("12.0", quant="modelopt_fp5"))


@pytest.mark.parametrize(
    ("deployment", "cause"),
    [({"tp": 4, "ep": 2}, "tp 4, ep 2"), ({"a2a": "deepep"}, "--moe-a2a-backend deepep"), ({"tp": 4, "ep": 4}, None)],
)
def test_a_failure_of_the_deployment_is_not_called_one_of_every_gpu(later, deployment, cause):
    route = only(later.routes(Query("12.0", **deployment), ("moe",)), "moe", "flashinfer_cutlass")
    said = "--moe-runner-backend flashinfer_cutlass is accepted by the command line, but modelopt_fp4 can only fail with it beside "
    assert route.traps == ((f"{said}{cause}",) if cause else ())


def test_unknown_a2a_names_those_there_are(later):
    with pytest.raises(LabError, match=r"no --moe-a2a-backend 'deep_ep'; this version has: none, deepep, .*flashinfer"):
        later.routes(Query("12.0", a2a="deep_ep"))


def test_unknown_backend_is_a_usage_error_not_an_empty_answer(capsys):
    asked = ["routes", "--sglang", "0.5.17", "--flashinfer", "none", "--op", "fp4_gemm", "--backend", "flashinfer_cutlas"]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no backend 'flashinfer_cutlas'" in err and "flashinfer_cutlass" in err


def test_a_function_whose_registering_import_is_guarded_does_not_just_work(later):
    """0.5.17 imports the module of experimental_sgl_trtllm under an environment variable that is off by default."""
    route = only(later.routes(Query("12.0"), ("moe",)), "moe", "experimental_sgl_trtllm")
    assert route.expected == "depends on the import of sglang.srt.lora.trtllm_lora_temp.sgl_backend: without it MoeRunner raises"


def test_without_the_enum_no_branch_is_guessed():
    """A future layout: the enum has another name. Nothing says which branch a value takes."""
    real, member = resolve("0.5.17"), "sglang/srt/layers/moe/utils.py"
    renamed = real.tree.read(member).replace(b"class MoeRunnerBackend", b"class MoeBackend")
    future = Package("sglang", real.version, "edited", source_tree.Overlay(real.tree, {member: renamed}))
    routes = Router(future, sglang_facts.read(future), None).routes(Query("12.0"), ("moe",))
    assert {route.final_call for route in routes} == {"not found"} and not any(route.traps for route in routes)
    assert "looked for class MoeRunnerBackend" in routes[0].gates[0].text
    told = routes_text.listing(routes, Query("12.0"), "sglang").splitlines()[2]
    assert told == "NOT READ  --moe-runner-backend: the enum of its backends was not found, so no trap could be looked for"
    assert "no trap found" not in routes_text.traps(routes)


def test_an_error_is_read_with_the_values_of_its_route(later):
    """0.5.17 formats the runner into its refusal (`auto` has become flashinfer_trtllm by then), and the card's number."""
    said = {route.backend: route.expected for route in later.routes(Query("12.0"), ("moe",), trapped=())}
    refused = "raises: NotImplementedError: Unsupported moe_runner_backend for NVFP4 MoE: {}. Use --moe-runner-backend"
    assert said["triton"].startswith(refused.format("triton")) and said["auto"].startswith(refused.format("flashinfer_trtllm"))
    assert said["hpc_ops"].endswith("got sm120.")
    assert not any("{" in expected for expected in said.values())


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ('ValueError(f"{backend!r} on sm{major}{minor}: {other}" + f" of {names}")', "marlin on sm120: … of a, b"),
        ('ValueError("{plain}")', "{plain}"),
        ("ValueError(code)", "code"),
        ("ValueError", "ValueError"),
    ],
)
def test_known_values_fill_a_message_and_the_others_are_an_ellipsis(tmp_path, raised, text):
    body = ["backend, names = 'marlin', ['a', 'b']", "major, minor = get_device_capability()", f"raise {raised}"]
    code = "\n    ".join(["from sglang.srt.utils.common import get_device_capability\ndef f(other, code):", *body]) + "\n"
    root = source_tree.write(tmp_path / "t", source_tree.MEMBERS | {"sglang/srt/refuses.py": code})
    reading = Reading(Index(resolve(root)))
    flow = reading.flow(reading.index.resolve("sglang.srt.refuses.f"), Scenario.of((12, 0)))
    assert [event.value for event in flow.of_kind("raise")] == [text]


def test_a_placeholder_of_flashinfer_is_an_ellipsis_and_a_set_is_not():
    said = "n in {1, 2} (ValueError: got {n}, not {b.shape[1]})"
    values = (("op:x", "requires", said), ("op", "backends", ["x"]), ("op:x", "supported_cc", [120]))
    rows = [Fact("flashinfer", "1", *value, "f.py", 1) for value in values]
    texts = [gate.text for gate in routes_flashinfer.gates(Facts(rows), "flashinfer.op", "x", Query("12.0"))]
    assert "depends on n in {1, 2} (ValueError: got …, not …)" in texts


def test_a_quantisation_without_fp4_is_not_answered(later):
    with pytest.raises(LabError, match=r"'fp8' \(Fp8Config\) names no FP4 class"):
        later.routes(Query("12.0", quant="fp8"))


def test_compressed_tensors_has_its_own_scheme(march):
    route = only(march.routes(Query("10.0", quant="compressed-tensors-nvfp4"), ("moe",), trapped=()), "moe", "flashinfer_trtllm")
    assert route.final_call == "flashinfer.trtllm_fp4_block_scale_moe"
    assert route.hops[-1].file.endswith("compressed_tensors_w4a4_nvfp4_moe.py")


def test_evidence_is_never_ok(march):
    p, query = Params(sglang="0.5.9", flashinfer="0.6.5", cc="12.0"), Query("12.0")
    records = routes_evidence.of_routes(march.routes(query), query, march, p)
    verdicts = {record.subject: record.verdict for record in records if not record.details["when"]}
    assert verdicts["moe:flashinfer_trtllm:modelopt_fp4"] is Verdict.UNSUPPORTED
    assert verdicts["moe:flashinfer_cutlass:modelopt_fp4"] is Verdict.NOT_RUN
    assert Verdict.OK not in verdicts.values()
    assert all(record.stack.sglang == "0.5.9" and record.stack.flashinfer == "0.6.5" for record in records)


def test_command_writes_the_contract():
    command = ["routes", "--sglang", "0.5.9", "--flashinfer", "none", "--cc", "12.0", "--op", "fp4_gemm", "--json"]
    done = subprocess.run([sys.executable, "-m", "nvfp4lab", *command], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert {"backend", "op", "when", "hops", "gates", "final_call", "expected", "traps"} <= rows[0].keys()
    assert {"file", "line", "why"} == rows[0]["hops"][0].keys()


def test_listing_puts_traps_first(march):
    query = Query("12.0")
    lines = routes_text.listing(march.routes(query, ("moe",)), query, march.names).splitlines()
    assert lines[0].startswith("sglang 0.5.9, flashinfer 0.6.5, compute capability 12.0")
    assert lines[2].startswith("TRAP  --moe-runner-backend auto: is left unresolved")
    assert any(line.startswith("TRAP  --moe-runner-backend deep_gemm, triton, triton_kernel,") for line in lines)


def test_every_trap_names_its_flag_and_value(later):
    found = routes_text.traps(later.routes(Query("9.0")))
    noted = Route("cutedsl", "moe", {}, (), (), "k", WORKS, traps=("not enforced: FlashInfer is for [100], asked is 120",))
    [line] = routes_text.traps([noted])
    assert line == "TRAP  --moe-runner-backend cutedsl: not enforced: FlashInfer is for [100], asked is 120"
    assert all(line.startswith(("TRAP  --moe-runner-backend ", "TRAP  --fp4-gemm-backend ")) for line in found)


def test_the_table_keeps_flags_apart_and_the_kernel_in_sight(march):
    table = routes_text.markdown_table(march.routes(Query("12.0")))
    moe, gemm = table.split("**--fp4-gemm-backend**")
    assert moe.startswith("**--moe-runner-backend**")
    assert "| value | expected | final call | when |" in moe
    assert "`flashinfer_cudnn`" in gemm
    assert "`flashinfer_cudnn`" not in moe
    assert "flashinfer.<wbr>mm_fp4" in gemm
    assert "it raises before one" not in table


def test_a_drawn_route_says_where_its_other_gates_are_listed(march):
    route = max(march.routes(Query("12.0"), ("moe",)), key=lambda route: len(route.gates))
    title = plots.route_graph(route, gates=1).axes[0].get_title(loc="left")
    assert f"`nvfp4lab routes --backend {route.backend}` lists {len(route.gates) - 1} more gates" in title


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("major == 10 || major == 12", True),
        ("props.major == 12 && props.minor == 1", False),
        ("sm_version >= 100", True),
        ("tile > 3", None),
        ("major == 10 || tile == 3", None),
        ("not C++ at all (", None),
    ],
)
def test_cpp_conditions_are_decided_or_left_open(condition, expected):
    assert routes_flashinfer._cpp_holds(condition, 12, 0) is expected


@given(
    st.lists(st.sampled_from([90, 100, 103, 110, 120, 121]), unique=True), st.booleans(), st.sampled_from(["9.0", "10.3", "12.0"])
)
def test_a_noted_list_never_refuses_and_an_enforced_one_does(listed, enforced, cc):
    rows = [("op", "supported_cc", listed), ("op", "enforced", enforced)]
    facts = Facts(Fact("flashinfer", "1", *row, "ops.py", 1) for row in rows)
    (gate,) = routes_flashinfer.gates(facts, "flashinfer.op", None, Query(cc))
    assert (gate.state == "met") is (Query(cc).number in listed)
    assert gate.refuses is enforced


pytestmark = pytest.mark.wheel
