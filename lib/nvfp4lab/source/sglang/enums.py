"""Backend enums: their values, which values each predicate covers, and the name that FlashInfer is given."""

from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.sglang.vocabulary import ENUMS, BackendEnum
from nvfp4lab.source.values import EnumValue, Scenario

# FlashInfer's names of dense FP4 backends; users ask for each, so its absence from a flag is a fact.
_FLASHINFER_GEMM_BACKENDS = ("b12x", "cudnn", "cutlass", "cute-dsl", "trtllm")


def read(reading: Reading) -> Iterator[Fact]:
    for subject, (name, _) in ENUMS.items():
        enum = reading.vocabulary.enums.get(subject)
        if enum is None:
            yield reading.not_found(subject, "enum_values", f"class {name}", "all modules of the package")
            continue
        at = (enum.definition.file, enum.definition.line)
        yield reading.fact(subject, "enum_values", list(enum.members.values()), at, scope=name, note=_open_set(reading, enum))
        yield from _predicates(reading, enum)
    yield from _capability_predicates(reading)
    if "fp4_gemm" in reading.vocabulary.enums:
        yield from _flashinfer_names(reading, reading.vocabulary.enums["fp4_gemm"])


def _open_set(reading: Reading, enum: BackendEnum) -> str:
    """Plug-ins may add values where the package defines a Registered... twin of the enum."""
    twin = reading.index.classes(f"Registered{enum.name}")
    return f"open set: extensions register more through {twin[0].name}" if twin else ""


def _predicates(reading: Reading, enum: BackendEnum) -> Iterator[Fact]:
    for method, definition in enum.methods.items():
        if not method.startswith(("is_", "supports_")):
            continue
        values = reading.vocabulary.true_for(enum, method)
        if values is None:
            continue
        subject = f"predicate:{enum.name}.{method}"
        yield reading.fact(subject, "true_for", values, (definition.file, definition.line), scope=definition.scope)


def _capability_predicates(reading: Reading) -> Iterator[Fact]:
    for predicate in reading.vocabulary.predicates.values():
        member = predicate.module.member
        note = f"also needs CUDA >= {'.'.join(map(str, predicate.cuda))}" if predicate.cuda else ""
        yield reading.fact(
            f"predicate:{predicate.name}",
            "cc_majors",
            list(predicate.majors),
            (member, predicate.majors_line),
            also=[(member, predicate.line)],
            note=note,
        )


def _flashinfer_names(reading: Reading, enum: BackendEnum) -> Iterator[Fact]:
    at = (enum.definition.file, enum.definition.line)
    offered = set(enum.members.values())
    for name in _FLASHINFER_GEMM_BACKENDS:
        exists = name in offered or f"flashinfer_{name.replace('-', '')}" in offered
        yield reading.fact(f"fp4_gemm:{name}", "exists", exists, at, scope=enum.name)
    method = enum.methods.get("get_flashinfer_backend")
    if method is None:
        yield reading.not_found("fp4_gemm", "flashinfer_backend_name", f"{enum.name}.get_flashinfer_backend", enum.definition.file)
        return
    for value in offered:
        if not value.startswith("flashinfer_"):
            continue
        flow = reading.flow(method, Scenario(), {"self": EnumValue(enum.name, value)})
        returned = next(flow.of_kind("return"), None)
        if returned is not None and isinstance(returned.value, str):
            yield reading.fact(
                f"fp4_gemm:{value}:modelopt_fp4",
                "flashinfer_backend_name",
                returned.value,
                (method.file, returned.line),
                also=[(method.file, line) for line in returned.decided],
                scope=method.scope,
            )
