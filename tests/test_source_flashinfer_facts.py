"""FlashInfer facts on a small tree that holds every construct once, and on the real package against the answer key."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4lab.source import flashinfer_conditions, flashinfer_facts
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.index import Index
from nvfp4lab.source.package import resolve

UTILS = """
def supported_compute_capability(supported_ccs):
    def decorator(func):
        func._supported_ccs = set(supported_ccs)
        return func
    return decorator

def backend_requirement(checks, common_check=None, heuristic_func=None):
    def decorator(func):
        def wrapper(*args, **kwargs):
            return func(*args, **kwargs)
        return wrapper
    return decorator
"""
CHECKS = """
from ..utils import supported_compute_capability

_CCS = (100, 103)

@supported_compute_capability([*_CCS, 110])
def cake_check(a, b, backend="auto"):
    if a.shape[1] % 32 != 0:
        if backend != "cake":
            return False
        raise ValueError(f"cake needs K, got {a.shape[1]}")
    return True
"""
OPS = """
import os
os.remove(os.environ["NVFP4LAB_TEST_MARKER"])  # whoever imports this is found out
from ..utils import supported_compute_capability, backend_requirement, get_compute_capability
from .checks import cake_check as _cake

_MIN = Version("12.9")

@supported_compute_capability([120, 121])
def _b12x(a, b, use_nvfp4=True):
    if get_cuda_version().major < 13:
        raise ValueError("b12x needs CUDA 13")
    if not use_nvfp4:
        if a.ndim == 3:
            raise TypeError("no batch for mxfp4")
    return True

@supported_compute_capability(_from_elsewhere())
def _dynamic(a, b):
    return True

def _heuristic(suitable, a, use_nvfp4=True, batch_invariant=False):
    major, minor = get_compute_capability(a.device)
    is_sm120 = major == 12 and minor == 0
    if batch_invariant:
        return ["batch"]
    if is_sm120 and (get_cuda_version() >= _MIN if use_nvfp4 else get_cuda_version().major >= 13):
        return [c for c in ("b12x", "cake") if c in suitable]
    if CUDNN_AVAILABLE and get_cuda_version().major >= 13 and cudnn.backend_version() >= 91500:
        order = ("cudnn", "cake")
    else:
        order = ("cake", "cudnn")
    return [c for c in order if c in suitable]

@backend_requirement({"b12x": _b12x, "cake": _cake, "odd": lambda a, b: True, "dyn": _dynamic}, heuristic_func=_heuristic)
@flashinfer_api
def mm_fp4(a, b, backend: str = "auto"):
    return get_gemm_module(f"{a}").run(a)

@supported_compute_capability([100, 103])
@flashinfer_api
def cute_dsl_fused_moe_nvfp4(x):
    return x

@functools.cache
def get_gemm_module(backend: str = "100"):
    table = {"121": gen_a, "120": gen_a, "120f": gen_f}
    if backend in ("120", "121"):
        if version_at_least(cuda, "12.9"):
            backend = "120f"
    return table[backend]().build_and_load()

@functools.cache
def get_moe_module(backend: str = "100"):
    if backend in ("120", "121"):
        module = gen_fused_moe_sm120_module()
    elif backend == "90":
        module = gen_fused_moe_sm90_module()
    else:
        raise ValueError(backend)
    return module

@flashinfer_api
def cutlass_fused_moe(x):
    major, minor = get_compute_capability(x.device)
    if major == 11 and minor == 0:
        raise ValueError("no fp4 moe on SM110")
    return get_moe_module(f"{major}{minor}")(x)

def gen_fused_moe_sm120_module():
    return flags(supported_major_versions=[12]), DIR / "moe_launcher.cu"
"""
LAUNCHER = """
void helper_check(int device) {
  TVM_FFI_ICHECK_EQ(major, 10) << "helper";
}
void Launcher::init_common(int device) {
  TVM_FFI_ICHECK(major == 10 || major == 12)
      << "MoE kernel requires SM 10.x";
  TVM_FFI_ICHECK(weights.size(0) > 12) << "not a capability";
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp4_block_scale_moe, fp4_block_scale_moe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bf16_moe, bf16_moe);
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fi")
    files = {
        "flashinfer/__init__.py": "",
        "flashinfer/utils.py": UTILS,
        "flashinfer/gemm/checks.py": CHECKS,
        "flashinfer/gemm/ops.py": OPS,
        "flashinfer/gemm/broken_fp4.py": "@backend_requirement({\n  fp4 = ",
        "flashinfer/data/csrc/moe_launcher.cu": LAUNCHER,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def facts(tree) -> list[Fact]:
    marker = tree / "marker"
    marker.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4LAB_TEST_MARKER", str(marker))
        found = flashinfer_facts.read(resolve(tree, "flashinfer"))
    assert marker.exists(), "the target was imported"
    return found


def values(facts: list[Fact], subject: str, predicate: str) -> list:
    return [fact.value for fact in facts if (fact.subject, fact.predicate) == (subject, predicate)]


def test_backend_lists_are_enforced_and_followed_across_modules(facts):
    assert values(facts, "mm_fp4", "enforced") == [True]
    assert values(facts, "mm_fp4", "backends") == [["b12x", "cake", "odd", "dyn"]]
    assert values(facts, "mm_fp4:b12x", "supported_cc") == [[120, 121]]
    cake = next(fact for fact in facts if (fact.subject, fact.predicate) == ("mm_fp4:cake", "supported_cc"))
    assert (cake.value, cake.file, cake.evidence) == (
        [100, 103, 110],
        "flashinfer/gemm/checks.py",
        "@supported_compute_capability([*_CCS, 110])",
    )


def test_what_is_not_constant_is_not_guessed(facts):
    assert values(facts, "mm_fp4:odd", "supported_cc") == ["not found"]
    assert values(facts, "mm_fp4:dyn", "supported_cc") == ["depends on _from_elsewhere()"]


def test_bare_list_is_only_noted(facts):
    assert values(facts, "cute_dsl_fused_moe_nvfp4", "supported_cc") == [[100, 103]]
    assert values(facts, "cute_dsl_fused_moe_nvfp4", "enforced") == [False]
    assert values(facts, "supported_compute_capability", "semantics")[0].startswith("annotation only (sets func._supported_ccs)")


def test_a_wrapping_decorator_is_not_called_an_annotation(tree, tmp_path):
    for name in ("flashinfer/__init__.py", "flashinfer/gemm/checks.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((tree / name).read_text())
    (tmp_path / "flashinfer/utils.py").write_text(UTILS.replace("        return func\n", "        return guarded(func)\n", 1))
    found = flashinfer_facts.read(resolve(tmp_path, "flashinfer"))
    assert "may enforce" in values(found, "supported_compute_capability", "semantics")[0]


def test_requirements_say_what_must_hold_and_under_which_condition(facts):
    found = values(facts, "mm_fp4:b12x", "requires")
    assert "get_cuda_version().major >= 13 (ValueError: b12x needs CUDA 13)" in found
    assert "a.ndim != 3 when (not use_nvfp4) (TypeError: no batch for mxfp4)" in found
    assert values(facts, "mm_fp4:cake", "requires_k") == ["a.shape[1] % 32 == 0 (ValueError: cake needs K, got {a.shape[1]})"]
    assert not values(facts, "mm_fp4:cake", "requires_n")


def test_auto_is_read_path_by_path(facts):
    found = {str(dict(fact.when)): fact.value for fact in facts if fact.predicate == "auto_candidates"}
    assert found["{'batch_invariant': True}"] == ["batch"]
    assert found["{'cc': [120], 'use_nvfp4': True, 'cuda': '>=12.9'}"] == ["b12x", "cake"]
    assert found["{'cc': [120], 'use_nvfp4': False, 'cuda': '>=13'}"] == ["b12x", "cake"]
    assert found["{'otherwise': True, 'cuda': '>=13', 'cudnn': '>=91500'}"] == ["cudnn", "cake"]
    assert found["{'otherwise': True}"] == ["cake", "cudnn"]
    assert len(found) == 5


def test_module_tables_by_dict_and_by_chain(facts):
    assert values(facts, "mm_fp4", "supported_cc") == [[120, 121]]  # the table's; 120f is a rewrite, not a capability
    assert values(facts, "mm_fp4", "module_override") == ["120f when version_at_least(cuda, '12.9')"]
    assert values(facts, "cutlass_fused_moe", "supported_cc") == [[90, 120, 121]]
    assert values(facts, "cutlass_fused_moe", "built_for_majors") == [[12]]
    assert values(facts, "jit:gen_fused_moe_sm120_module", "supported_majors") == [[12]]
    refusal = next(fact for fact in facts if fact.predicate == "raises_on")
    assert (refusal.subject, dict(refusal.when)) == ("cutlass_fused_moe", {"cc": [110]})


def test_cpp_checks_know_where_they_stand(facts):
    assert values(facts, "fp4_block_scale_moe", "gate_cpp") == ["major == 10 || major == 12"]
    assert values(facts, "fp4_block_scale_moe", "gate_cpp_maybe") == ["major == 10"]
    assert not [fact for fact in facts if fact.subject == "bf16_moe" and fact.predicate.startswith("gate")]
    assert all("not AST" in fact.note for fact in facts if fact.predicate.startswith("gate_cpp"))


def test_absence_and_damage_are_said(tree, facts):
    assert values(facts, "b12x_fused_moe", "exists") == [False]
    assert values(facts, "mm_fp4", "exists") == [True]
    assert values(facts, "mm_fp4", "default_backend") == ["auto"]
    index = Index(resolve(tree, "flashinfer"))
    assert flashinfer_facts.read(index.package, index)
    assert list(index.unparsable) == ["flashinfer/gemm/broken_fp4.py"]


ATOMS = st.sampled_from(["a", "b", "n % 8 != 0", "n == 3", "n < 5", "not a", "a is None", "n in (1, 2)"])
TESTS = st.recursive(
    ATOMS, lambda inner: st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
)


@given(TESTS, st.booleans(), st.booleans(), st.integers(0, 20))
def test_a_requirement_is_the_negation_of_its_guard(text, a, b, n):
    guard = ast.parse(text, mode="eval").body
    names = {"a": a, "b": b, "n": n}
    assert bool(eval(flashinfer_conditions.requirement(guard), names)) is not bool(eval(text, names))


@pytest.mark.wheel
def test_real_package_against_the_key():
    key_file = Path(__file__).parents[2] / "shared/truth/facts_key.json"
    if not key_file.exists():
        pytest.skip("the answer key is not beside this checkout")
    version = "0.6.15.post1"
    key = [row for row in json.loads(key_file.read_text()) if row.get("flashinfer_version") == version]
    found = flashinfer_facts.read_cached(resolve(version, "flashinfer"))
    missed = [row["id"] for row in key if not any(_answers(fact, row) for fact in found)]
    assert len(key) == 37
    assert missed == []


def _answers(fact: Fact, row: dict) -> bool:
    if (fact.subject, fact.predicate) != (row["subject"], row["predicate"]):
        return False
    lines = {(row["file"], row["line"]), *((place["file"], place["line"]) for place in row.get("also") or ())}
    if not lines & {(place.file, place.line) for place in fact.places()}:
        return False
    same = (
        sorted(map(str, fact.value)) == sorted(map(str, row["value"]))
        if isinstance(row["value"], list)
        else fact.value == row["value"]
    )
    return row["match"] == "text" or (same and dict(fact.when) == (row.get("when") or {}))
