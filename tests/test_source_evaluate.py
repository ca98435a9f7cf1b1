"""Three-valued evaluation: what is provable is decided, everything else stays open and both branches are read."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import source_tree
from nvfp4lab.source import capability
from nvfp4lab.source.evaluate import Frame
from nvfp4lab.source.facts import holds
from nvfp4lab.source.index import Index
from nvfp4lab.source.package import resolve
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import UNKNOWN, EnumValue, Scenario, truth


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    return Reading(Index(resolve(source_tree.write(tmp_path_factory.mktemp("site")))))


def evaluate(reading, text, cc=(12, 0), **flags):
    module = reading.index.by_dotted("sglang.srt.layers.quantization.fp4_utils")
    return reading.evaluator(Scenario.of(cc, **flags)).value(ast.parse(text, mode="eval").body, Frame(None, module))


@pytest.mark.parametrize(
    ("text", "cc", "value"),
    [
        ("is_sm100_supported()", (10, 3), True),
        ("is_sm100_supported()", (12, 0), False),
        ("(10, 0) > get_device_capability() >= (8, 0)", (8, 9), True),
        ("(10, 0) > get_device_capability() >= (8, 0)", (10, 0), False),
        ("is_cuda() and not is_sm100_supported()", (9, 0), True),
        ("anything and is_sm100_supported()", (12, 0), False),
        ("anything or is_sm100_supported()", (10, 0), True),
        ("server_args.moe_runner_backend == 'auto'", (12, 0), True),
        ("view.moe_runner_backend in ('marlin', 'triton')", (12, 0), False),
        ("'a' if is_sm100_supported() else 'b'", (12, 0), "b"),
        ("Fp4GemmRunnerBackend('marlin').is_flashinfer()", (12, 0), False),
        ("Fp4GemmRunnerBackend.FLASHINFER_CUTEDSL.get_flashinfer_backend()", (12, 0), "cute-dsl"),
    ],
)
def test_what_is_provable_is_decided(reading, text, cc, value):
    assert evaluate(reading, text, cc, moe_runner_backend="auto") == value


@pytest.mark.parametrize(
    "text",
    [
        "anything and not is_sm100_supported()",
        "anything == 3",
        "layer.weight.shape[0] % 16 == 0",
        "Fp4GemmRunnerBackend(whatever).is_auto()",
        "Fp4GemmRunnerBackend.MARLIN.is_mystery()",
        "x in ('a', y)",
        "hasattr(layer, 'name')",
        "envs.SOME_VARIABLE.get()",
        "(1, anything) < (2, 3)[:anything]",
    ],
)
def test_what_is_not_provable_stays_open(reading, text):
    assert truth(evaluate(reading, text)) is None


def test_unknown_has_no_truth_of_its_own():
    with pytest.raises(TypeError):
        bool(UNKNOWN)


def test_predicates_are_read_through_bases_and_unknown_bodies_are_left_out(reading):
    vocabulary = reading.vocabulary
    assert vocabulary.true_for(vocabulary.enums["moe_runner"], "is_marlin") == ["marlin", "other_marlin"]
    assert vocabulary.true_for(vocabulary.enums["fp4_gemm"], "is_weight_only") == ["marlin"]
    assert vocabulary.true_for(vocabulary.enums["fp4_gemm"], "is_mystery") is None
    assert vocabulary.enum_member("Fp4GemmRunnerBackend", "MARLIN") == EnumValue("Fp4GemmRunnerBackend", "marlin")


def test_chained_assignments_define_both_predicates(reading):
    majors = {name: predicate.majors for name, predicate in reading.vocabulary.predicates.items()}
    assert majors == {"is_blackwell_supported": (10, 11, 12), "is_blackwell": (10, 11, 12), "is_sm100_supported": (10,)}


@given(st.sets(st.sampled_from(capability.KNOWN[1:]), min_size=1))
def test_every_way_to_state_capabilities_is_sound_and_the_first_is_complete(admitted):
    """`cc: "<100"` also covers what is older than NVFP4 can run on, so (7, 5) is left out of the trial."""
    forms = capability.when(admitted)
    said = [{cc for cc in capability.KNOWN[1:] if holds(form, {"cc": f"{cc[0]}.{cc[1]}"})} for form in forms]
    assert all(one <= admitted for one in said)
    assert (said[0] if forms else set(capability.KNOWN[1:])) == admitted
