"""SGLang's own words: the backend enums with their predicates, and the capability predicates.

Enums are found by class name wherever they are defined; predicates through base classes (0.5.23 moved them to a mixin).
"""

import ast
import dataclasses
import functools
from collections.abc import Iterator

from nvfp4lab.source.evaluate import Evaluator
from nvfp4lab.source.index import Index
from nvfp4lab.source.module import Definition, Module
from nvfp4lab.source.sglang.requirements import numbers, pinned
from nvfp4lab.source.values import EnumValue, Scenario

# subject in facts -> (enum class, ServerArgs field)
ENUMS = {
    "fp4_gemm": ("Fp4GemmRunnerBackend", "fp4_gemm_runner_backend"),
    "moe_runner": ("MoeRunnerBackend", "moe_runner_backend"),
    "moe_a2a": ("MoeA2ABackend", "moe_a2a_backend"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class BackendEnum:
    """One backend enum. members: {NAME: flag value}. methods: name -> definition, bases included."""

    subject: str
    definition: Definition
    members: dict[str, str]
    methods: dict[str, Definition]

    @property
    def name(self) -> str:
        return self.definition.name


@dataclasses.dataclass(frozen=True)
class CapabilityPredicate:
    """A function that is true on some compute capability majors. cuda: least CUDA version it also asks for."""

    name: str
    majors: tuple[int, ...]
    cuda: tuple[int, ...] | None
    module: Module
    line: int
    majors_line: int


class SglangVocabulary:
    """Enums and predicates of one package. Missing enums are absent here; the readers report them as not found."""

    def __init__(self, index: Index):
        self.index = index
        self.enums = {subject: enum for subject, (name, _) in ENUMS.items() if (enum := _read_enum(index, subject, name))}
        self._by_class = {enum.name: enum for enum in self.enums.values()}

    @functools.cached_property
    def predicates(self) -> dict[str, CapabilityPredicate]:
        """Capability predicates by function name."""
        return {found.name: found for module in self.index.modules(b"device_capability_majors") for found in _partials(module)}

    @functools.cached_property
    def _probe_names(self) -> dict[str, str]:
        """Attribute name -> predicate name where a string table maps platform attributes to probes."""
        table: dict[str, str] = {}
        for module in self.index.modules(b"is_sm100", b"is_sm100_supported"):
            for assigned in module.constants.values():
                for node in assigned:
                    if isinstance(node.value, ast.Dict):
                        table |= _string_pairs(node.value)
        return table

    def enum_member(self, class_name: str, member: str) -> EnumValue | None:
        enum = self._by_class.get(class_name)
        return EnumValue(class_name, enum.members[member]) if enum and member in enum.members else None

    def enum_of_value(self, class_name: str, value: str) -> EnumValue | None:
        enum = self._by_class.get(class_name)
        return EnumValue(class_name, value) if enum and value in enum.members.values() else None

    def enum_method(self, class_name: str, method: str) -> Definition | None:
        enum = self._by_class.get(class_name)
        return enum.methods.get(method) if enum else None

    def getter_flag(self, definition: Definition) -> tuple[str, str] | None:
        """(ServerArgs field, enum class) when a function's return annotation is a backend enum and it takes nothing.

        The speculative getters return the draft model's backends, which are other flags.
        """
        node = definition.node
        if not isinstance(node, ast.FunctionDef) or node.returns is None or node.args.args or "speculative" in node.name:
            return None
        words = ast.unparse(node.returns)
        for subject, enum in self.enums.items():
            if words == enum.name or enum.name in self._alias_members(definition.module, words):
                return ENUMS[subject][1], enum.name
        return None

    def _alias_members(self, module: Module, alias: str) -> frozenset[str]:
        assigned = module.constants.get(alias.strip("'\""), ())
        return frozenset(node.id for value in assigned for node in ast.walk(value.value) if isinstance(node, ast.Name))

    def capability_majors(self, predicate: str) -> tuple[int, ...] | None:
        found = self.predicates.get(predicate) or self.predicates.get(self._probe_names.get(predicate, ""))
        return found.majors if found else None

    def has_package(self, distribution: str, version: str) -> bool | None:
        """Whether the release that this SGLang pins is at least `version`; None when it pins none."""
        asked = pinned(self.index.package, distribution)
        return None if asked is None else asked >= numbers(version)

    def true_for(self, enum: BackendEnum, method: str) -> list[str] | None:
        """Flag values for which a predicate method is true, in member order; None when its body is not understood."""
        evaluator = Evaluator(self.index, self, Scenario())
        answers = {
            value: evaluator.returned(enum.methods[method], {"self": EnumValue(enum.name, value)})
            for value in enum.members.values()
        }
        if not all(isinstance(answer, bool) for answer in answers.values()):
            return None
        return [value for value, answer in answers.items() if answer]


def _read_enum(index: Index, subject: str, name: str) -> BackendEnum | None:
    definition = next((found for found in index.classes(name) if isinstance(found.node, ast.ClassDef)), None)
    if definition is None:
        return None
    members = {
        node.targets[0].id: node.value.value
        for node in definition.node.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
    }
    methods: dict[str, Definition] = {}
    for owner in reversed([definition, *_bases(index, definition)]):
        methods |= owner.methods
    return BackendEnum(subject, definition, members, methods)


def _bases(index: Index, definition: Definition) -> Iterator[Definition]:
    """Base classes written in the package, nearest first."""
    for base in definition.node.bases:
        name = ast.unparse(base).rsplit(".", 1)[-1]
        found = definition.module.definitions.get(name)
        if found is None:
            targets = definition.module.imports.get(name, ())
            found = next((hit for target in sorted(targets) if (hit := index.resolve(target.dotted))), None)
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield found
            yield from _bases(index, found)


def _partials(module: Module) -> Iterator[CapabilityPredicate]:
    """`name = ... = lru_cache(...)(partial(check, device_capability_majors=[..], cuda_version=(..)))`, in any nesting."""
    for name, assigned in module.constants.items():
        for call in (inner for node in assigned for inner in ast.walk(node.value) if isinstance(inner, ast.Call)):
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(majors := words.get("device_capability_majors"), ast.List | ast.Tuple):
                numbers = tuple(item.value for item in majors.elts if isinstance(item, ast.Constant))
                cuda = words.get("cuda_version")
                version = (
                    tuple(item.value for item in cuda.elts if isinstance(item, ast.Constant))
                    if isinstance(cuda, ast.Tuple)
                    else None
                )
                yield CapabilityPredicate(name, numbers, version, module, assigned[-1].lineno, majors.lineno)


def _string_pairs(node: ast.Dict) -> dict[str, str]:
    pairs = zip(node.keys, node.values, strict=True)
    return {
        key.value: value.value
        for key, value in pairs
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(value.value, str)
    }
