"""All facts about one FlashInfer: capability lists, gates, `auto`, module tables, JIT majors, C++ checks, package pins."""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source import flashinfer_capability, flashinfer_cpp, flashinfer_modules, report
from nvfp4lab.source.facts import Fact, Place
from nvfp4lab.source.flashinfer_reader import Reader
from nvfp4lab.source.index import Index
from nvfp4lab.source.module import Definition
from nvfp4lab.source.package import Package

# Operations that SGLang's FP4 path calls or that its users ask for: their absence is a fact of its own.
ASKED_FOR = (
    "mm_fp4",
    "mm_bf16_fp4",
    "grouped_mm_fp4",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_gemm_nt_masked",
    "fp4_quantize",
    "nvfp4_quantize",
    "cutlass_fused_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "cute_dsl_fused_moe_nvfp4",
    "CuteDslMoEWrapper",
    "b12x_fused_moe",
    "B12xMoEWrapper",
)

_ENTRY = "flashinfer/__init__.py"


def read(package: Package, index: Index | None = None) -> list[Fact]:
    """Facts of one FlashInfer, without importing it. `index`: reuse one that is already there.

    Raises LabError when the package cannot be read. Members that do not parse are in `index.unparsable`.
    """
    reader = Reader(index or Index(package))
    found: list[Fact] = []
    for part in (flashinfer_capability.facts, flashinfer_modules.facts, flashinfer_cpp.facts, _definitions, _pins):
        found += part(reader)
    return list(
        {(fact.subject, fact.predicate, str(fact.value), str(fact.when), fact.file, fact.line): fact for fact in found}.values()
    )


def read_cached(package: Package) -> list[Fact]:
    """As `read`, kept by the content of the package and of the readers."""
    return report.facts_of(package, read)[0]


def _definitions(reader: Reader) -> Iterator[Fact]:
    """Where each asked-for or decorated operation is defined, the default of its `backend`, and which ones do not exist."""
    defined = set()
    for module in reader.modules:
        for definition in module.definitions.values():
            if definition.name in ASKED_FOR or (
                flashinfer_capability.is_on_topic(definition) and flashinfer_capability.is_public(definition)
            ):
                defined.add(definition.name)
                yield from _definition(reader, definition)
    for name in ASKED_FOR:
        if name not in defined:
            yield from _elsewhere(reader, name)


def _definition(reader: Reader, definition: Definition) -> Iterator[Fact]:
    at = (definition.module, definition.line)
    kind = "class" if isinstance(definition.node, ast.ClassDef) else "def"
    yield reader.fact(definition.name, "defined_at", f"{kind} {definition.name}", at, scope=definition.scope)
    yield reader.fact(definition.name, "exists", True, at, scope=definition.scope)
    if kind == "def":
        yield from _default_backend(reader, definition)


def _elsewhere(reader: Reader, name: str) -> Iterator[Fact]:
    """An operation that no decorated module defines: found anywhere in the package, or not found."""
    found = [*reader.index.functions(name), *reader.index.classes(name)]
    for definition in found:
        yield from _definition(reader, definition)
    if not found:
        note = f"no function or class of that name in {reader.index.files_read} modules"
        yield Fact("flashinfer", reader.version, name, "exists", False, _ENTRY, 1, note=note)


def _default_backend(reader: Reader, definition: Definition) -> Iterator[Fact]:
    arguments = definition.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    for argument, default in pairs:
        if argument.arg == "backend" and isinstance(default, ast.Constant) and isinstance(default.value, str):
            also = [(definition.module, definition.line)]
            yield reader.fact(
                definition.name,
                "default_backend",
                default.value,
                (definition.module, argument.lineno),
                also=also,
                scope=definition.scope,
            )


def _pins(reader: Reader) -> Iterator[Fact]:
    """`requires_dist` of the wheel's METADATA, one fact per package."""
    member = reader.index.package.metadata_member()
    if member is None or not member.endswith("METADATA"):
        return
    for line, text in enumerate(reader.index.package.tree.read(member).decode("utf-8", errors="replace").splitlines(), 1):
        found = re.match(r"Requires-Dist:\s*([\w.-]+)\s*([^;]*)", text)
        if found:
            name = found[1].lower().replace("-", "_").replace(".", "_")
            place = Place(member, line, text.strip())
            yield Fact(
                "flashinfer",
                reader.version,
                "package",
                f"requires_{name}",
                found[2].strip() or "any",
                place.file,
                line,
                evidence=place.evidence,
            )
