"""Three-valued evaluation of the target's expressions for one scenario. Nothing is imported or executed.

What is provably constant for the scenario is evaluated: enum predicates, capability predicates and compares, flags read
from any view of ServerArgs, attributes that `__init__` sets, small pure functions. Everything else is UNKNOWN.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nvfp4lab.source.index import Index
from nvfp4lab.source.module import Definition, Module
from nvfp4lab.source.values import UNKNOWN, EnumValue, Instance, Layer, Reference, Scenario, Self, Unknown, truth

# Platform probes under the lab's assumption of an NVIDIA GPU.
PLATFORM = {"is_cuda": True, "is_cuda_alike": True, "is_flashinfer_available": True, "has_flashinfer": True} | dict.fromkeys(
    ("is_hip", "is_npu", "is_cpu", "is_xpu", "is_musa", "is_hpu", "is_mps", "is_gfx95_supported", "is_gfx942_supported"), False
)
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_STRING_METHODS = {"startswith", "endswith", "removeprefix", "removesuffix", "lower", "upper", "strip", "replace"}
_MAX_DEPTH = 6


class Vocabulary(Protocol):
    """What the evaluator must know of a package: its backend enums and capability predicates."""

    def enum_member(self, class_name: str, member: str) -> EnumValue | None: ...
    def enum_of_value(self, class_name: str, value: str) -> EnumValue | None: ...
    def enum_method(self, class_name: str, method: str) -> Definition | None: ...
    def getter_flag(self, definition: Definition) -> tuple[str, str] | None: ...
    def capability_majors(self, predicate: str) -> tuple[int, ...] | None: ...
    def has_package(self, distribution: str, version: str) -> bool | None: ...


class Frame:
    """Names visible at one point of one function: locals, then its imports, then the module."""

    def __init__(self, definition: Definition | None, module: Module, env: dict[str, Any] | None = None):
        self.definition = definition
        self.module = module
        self.imports: Mapping = definition.imports if definition else module.imports
        self.env = env if env is not None else {}

    def fork(self) -> "Frame":
        return Frame(self.definition, self.module, dict(self.env))


class Evaluator:
    """Evaluates expressions of one package for one scenario."""

    def __init__(self, index: Index, vocabulary: Vocabulary, scenario: Scenario):
        self.index = index
        self.vocabulary = vocabulary
        self.scenario = scenario
        self._depth = 0
        self._pure: dict[str, Any] = {}
        self._globals: dict[tuple[str, str], Any] = {}

    def truth(self, node: ast.expr, frame: Frame) -> bool | None:
        return truth(self.value(node, frame))

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """The value of `node`, or UNKNOWN."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method(node, frame) if method else UNKNOWN

    # -- leaves -------------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def _name(self, node: ast.Name, frame: Frame) -> Any:
        if node.id in frame.env:
            return frame.env[node.id]
        if node.id in frame.imports:
            return Reference(min(frame.imports[node.id], key=lambda target: (target.guarded, target.line)).dotted)
        return self._module_name(node.id, frame.module)

    def _module_name(self, name: str, module: Module) -> Any:
        if name in module.definitions:
            return Reference(module.definitions[name].dotted)
        key = (module.member, name)
        if key not in self._globals:
            assigned = module.ordinary.get(name)
            if assigned is None or self._depth >= _MAX_DEPTH:
                return UNKNOWN
            self._depth += 1
            self._globals[key] = UNKNOWN  # a name defined through itself stays unknown
            try:
                self._globals[key] = self.value(assigned.value, Frame(None, module))
            finally:
                self._depth -= 1
        return self._globals[key]

    def _tuple(self, node: ast.Tuple, frame: Frame) -> Any:
        return tuple(self.value(item, frame) for item in node.elts)

    _list = _set = _tuple

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part, frame) for part in node.values]
        return "".join(map(str, parts)) if all(isinstance(part, str | int) for part in parts) else UNKNOWN

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        base, key = self.value(node.value, frame), self.value(node.slice, frame)
        if isinstance(base, tuple) and isinstance(key, int) and -len(base) <= key < len(base):
            return base[key]
        return base.get(key, UNKNOWN) if isinstance(base, dict) and isinstance(key, str | int) else UNKNOWN

    def _dict(self, node: ast.Dict, frame: Frame) -> Any:
        keys = [self.value(key, frame) if key else UNKNOWN for key in node.keys]
        if any(not isinstance(key, str | int) for key in keys):
            return UNKNOWN
        return dict(zip(keys, (self.value(item, frame) for item in node.values), strict=True))

    # -- operators ----------------------------------------------------------------------------------------------

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
        stops_at = isinstance(node.op, ast.Or)
        last: Any = UNKNOWN
        unknown = False
        for item in node.values:
            last = self.value(item, frame)
            decided = truth(last)
            if decided is stops_at:
                # `unknown and False` is still False; `unknown or True` is true, of unknown value
                return last if not unknown else stops_at
            unknown |= decided is None
        return UNKNOWN if unknown else last

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            decided = truth(value)
            return UNKNOWN if decided is None else not decided
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        left, right = self.value(node.left, frame), self.value(node.right, frame)
        if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and isinstance(node.op, ast.Add | ast.Mult | ast.Sub):
            return {ast.Add: operator.add, ast.Mult: operator.mul, ast.Sub: operator.sub}[type(node.op)](left, right)
        return UNKNOWN

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        decided = self.truth(node.test, frame)
        if decided is None:
            left, right = self.value(node.body, frame), self.value(node.orelse, frame)
            return left if not isinstance(left, Unknown) and left == right else UNKNOWN
        return self.value(node.body if decided else node.orelse, frame)

    def _namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        frame.env[node.target.id] = value = self.value(node.value, frame)
        return value

    def _compare(self, node: ast.Compare, frame: Frame) -> Any:
        left = self.value(node.left, frame)
        answers = []
        for sign, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node, frame)
            answers.append(_compare_one(sign, left, right))
            left = right
        if False in answers:
            return False
        return UNKNOWN if any(isinstance(answer, Unknown) for answer in answers) else True

    # -- attributes and calls -----------------------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.attribute(self.value(node.value, frame), node.attr)

    def attribute(self, base: Any, name: str) -> Any:
        """`base.name`: enum members, attributes of the object read, flags by name under any other object."""
        if isinstance(base, EnumValue):
            return base.value if name == "value" else UNKNOWN
        if isinstance(base, Reference):
            member = self.vocabulary.enum_member(base.dotted.rsplit(".", 1)[-1], name)
            return member or Reference(f"{base.dotted}.{name}")
        if isinstance(base, Self) and not isinstance(known := base.attributes.get(name, UNKNOWN), Unknown):
            return known
        if isinstance(base, Self) and name in base.owner.methods:
            method = base.owner.methods[name]
            return self.returned(method, {"self": base}) if _is_property(method) else Reference(method.dotted)
        return self._probe(name)

    def _probe(self, name: str) -> Any:
        """A platform fact or ServerArgs field read by name from some object."""
        if self.scenario.sets(name):
            return self.scenario.flag(name)
        if name in ("device_capability", "get_device_capability") and self.scenario.cc:
            return self.scenario.cc
        majors = self.vocabulary.capability_majors(name)
        if majors is not None:
            return UNKNOWN if self.scenario.cc is None else self.scenario.cc[0] in majors
        return PLATFORM.get(name, UNKNOWN)

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "getattr", "hasattr", "tuple", "list", "set", "bool"):
            return self._builtin(node, frame)
        if isinstance(node.func, ast.Attribute):
            return self._method_call(node, node.func, frame)
        target = self.value(node.func, frame)
        return self._call_reference(target, node, frame) if isinstance(target, Reference) else UNKNOWN

    def _method_call(self, node: ast.Call, func: ast.Attribute, frame: Frame) -> Any:
        base = self.value(func.value, frame)
        arguments = [self.value(argument, frame) for argument in node.args]
        if isinstance(base, EnumValue):
            method = self.vocabulary.enum_method(base.enum, func.attr)
            return self.returned(method, {"self": base}) if method else UNKNOWN
        if isinstance(base, str) and func.attr in _STRING_METHODS and all(isinstance(a, str | tuple) for a in arguments):
            return getattr(base, func.attr)(*arguments)
        if isinstance(base, Self):
            method = base.owner.methods.get(func.attr)
            return self.returned(method, {"self": base}) if method and len(method.node.body) <= 12 else UNKNOWN
        if func.attr == "get_device_capability" and self.scenario.cc:
            return self.scenario.cc
        if isinstance(base, Unknown | Instance) and self.scenario.sets(func.attr):
            return self.scenario.flag(func.attr)  # `quant_config.get_name()` and the like
        if isinstance(base, Reference) and base.dotted.endswith("TopKOutputChecker") and self.scenario.sets("topk_format"):
            return func.attr.removeprefix("format_is_").upper() == self.scenario.flag("topk_format")
        if isinstance(base, Reference):
            return self._call_reference(Reference(f"{base.dotted}.{func.attr}"), node, frame)
        return UNKNOWN

    def _call_reference(self, target: Reference, node: ast.Call, frame: Frame) -> Any:
        name = target.dotted.rsplit(".", 1)[-1]
        if not isinstance(probed := self._probe(name), Unknown):
            return probed
        if name == "check_pkg_version_at_least" and len(node.args) == 2:
            wanted = [self.value(argument, frame) for argument in node.args]
            met = self.vocabulary.has_package(*wanted) if all(isinstance(word, str) for word in wanted) else None
            return UNKNOWN if met is None else met
        definition = self.index.resolve(target.dotted)
        if definition is None:
            return UNKNOWN
        if isinstance(definition.node, ast.ClassDef):
            argument = self.value(node.args[0], frame) if node.args else UNKNOWN
            member = self.vocabulary.enum_of_value(name, argument) if isinstance(argument, str) else None
            return member or Instance(name, node.lineno)
        if flag := self.vocabulary.getter_flag(definition):
            value = self.scenario.flag(flag[0])
            return EnumValue(flag[1], value) if isinstance(value, str) else UNKNOWN
        if len(definition.node.body) > 8 or node.args or node.keywords:
            return UNKNOWN
        if definition.dotted not in self._pure:
            self._pure[definition.dotted] = self.returned(definition, {})
        return self._pure[definition.dotted]

    def _builtin(self, node: ast.Call, frame: Frame) -> Any:
        name, values = node.func.id, [self.value(argument, frame) for argument in node.args]
        if name == "isinstance" and len(values) == 2 and isinstance(values[0], Instance | Self):
            own = values[0].type_name if isinstance(values[0], Instance) else values[0].owner.name
            types = values[1] if isinstance(values[1], tuple) else (values[1],)
            names = [t.dotted.rsplit(".", 1)[-1] for t in types if isinstance(t, Reference)]
            return True if own in names else UNKNOWN if len(names) < len(types) or isinstance(values[0], Self) else False
        if name == "getattr" and len(values) >= 2 and isinstance(values[1], str):
            found = self.attribute(values[0], values[1]) if isinstance(values[0], Self) else UNKNOWN
            has_default = len(values) == 3 and isinstance(values[0], Self)
            return values[2] if isinstance(found, Unknown) and has_default else found
        if name == "hasattr" and len(values) == 2 and isinstance(values[0], Layer) and isinstance(values[1], str):
            return values[1] in values[0].written
        if name in ("tuple", "list", "set") and len(values) == 1 and isinstance(values[0], tuple):
            return values[0]
        if name == "bool" and len(values) == 1 and truth(values[0]) is not None:
            return truth(values[0])
        return UNKNOWN

    def returned(self, definition: Definition, env: dict[str, Any]) -> Any:
        """What a small function returns for the scenario, when every way out returns the same."""
        if self._depth >= _MAX_DEPTH:
            return UNKNOWN
        self._depth += 1
        try:
            outcomes: list[Any] = []
            self._returns(definition.node.body, Frame(definition, definition.module, dict(env)), outcomes)
            first = outcomes[0] if outcomes else UNKNOWN
            same = all(not isinstance(value, Unknown) and value == first for value in outcomes)
            return first if same else UNKNOWN
        finally:
            self._depth -= 1

    def _returns(self, body: list[ast.stmt], frame: Frame, outcomes: list[Any]) -> bool:
        """Collect return values of `body`; True when it surely left the function."""
        for node in body:
            if isinstance(node, ast.Return):
                outcomes.append(self.value(node.value, frame) if node.value else None)
                return True
            if isinstance(node, ast.Raise):
                return True
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                frame.env[node.targets[0].id] = self.value(node.value, frame)
            elif isinstance(node, ast.If):
                decided = self.truth(node.test, frame)
                if decided is not None:
                    if self._returns(node.body if decided else node.orelse, frame, outcomes):
                        return True
                    continue
                left = self._returns(node.body, frame.fork(), outcomes)
                right = self._returns(node.orelse, frame.fork(), outcomes)
                if left and right:
                    return True
            elif isinstance(node, ast.Try):
                if self._returns(node.body, frame, outcomes):
                    return True
            elif isinstance(node, ast.For | ast.While | ast.With | ast.AugAssign):
                outcomes.append(UNKNOWN)
                return True
        return False


def _compare_one(sign: ast.cmpop, left: Any, right: Any) -> Any:
    if isinstance(sign, ast.Is | ast.IsNot):
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return UNKNOWN
        same = left is right or (type(left) is type(right) and left == right)
        return same if isinstance(sign, ast.Is) else not same
    if isinstance(sign, ast.In | ast.NotIn):
        inside = _contains(right, left)
        return inside if isinstance(sign, ast.In) or isinstance(inside, Unknown) else not inside
    if isinstance(left, Unknown) or isinstance(right, Unknown) or isinstance(left, Reference) or isinstance(right, Reference):
        return UNKNOWN
    try:
        return _COMPARE[type(sign)](left, right)
    except TypeError:
        return UNKNOWN


def _contains(container: Any, item: Any) -> Any:
    if isinstance(item, Unknown) or not isinstance(container, tuple | str | dict):
        return UNKNOWN
    if isinstance(container, str):
        return item in container if isinstance(item, str) else UNKNOWN
    members = list(container)
    if any(not isinstance(member, Unknown) and member == item and type(member) is type(item) for member in members):
        return True
    return UNKNOWN if any(isinstance(member, Unknown | Reference) for member in members) else False


def _is_property(definition: Definition) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in definition.node.decorator_list)
