"""Facts about what FlashInfer compiles for which GPU: module tables by capability string, and majors of JIT builds.

A module getter such as `get_cutlass_fused_moe_module(backend)` maps "120" to a generator, by a dict or by an if/elif chain;
an unlisted string raises. A generator asks for `supported_major_versions=[...]`, and a build for another major raises.
The getters are tied to the public operations that call them, through at most three calls inside the module.
"""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flashinfer_capability import is_on_topic, is_public
from nvfp4lab.source.flashinfer_conditions import exception_of, guards, message_of, single_assignments
from nvfp4lab.source.flashinfer_reader import Reader
from nvfp4lab.source.module import Definition, Module

_CALL_DEPTH = 3


def facts(reader: Reader) -> Iterator[Fact]:
    """Module tables, JIT majors, capability predicates and capability refusals of the FP4 and MoE operations."""
    for module in reader.modules:
        yield from _majors(reader, module)
        functions = {name: found for name, found in module.definitions.items() if not isinstance(found.node, ast.ClassDef)}
        public = [found for name, found in functions.items() if is_public(found) and is_on_topic(found)]
        getters = [found for name, found in functions.items() if re.fullmatch(r"get_\w+_module", name)]
        calls = {name: _called_names(found.node) for name, found in functions.items()} if getters else {}
        reaching = {getter.name: _reaching(calls, getter.name) for getter in getters}
        for operation in public:
            own = [getter for getter in getters if operation.name in reaching[getter.name]]
            for getter in own:
                yield from _table(reader, operation.name, getter)
            if len(own) == 1:  # with several, the backend decides which one is loaded
                yield from _built_for(reader, operation.name, own[0])
        for operation in public:
            yield from _predicates(reader, operation, functions)
            yield from _refusals(reader, operation)


def _called_names(node: ast.AST) -> set[str]:
    return {call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def _reaching(calls: dict[str, set[str]], name: str) -> set[str]:
    """Functions of a module that call `name` through at most three calls."""
    reaching = {name}
    for _ in range(_CALL_DEPTH):
        reaching |= {caller for caller, called in calls.items() if called & reaching}
    return reaching - {name}


def _table(reader: Reader, operation: str, getter: Definition) -> Iterator[Fact]:
    keys, line = _dict_keys(getter)
    first, second = (line, getter.line) if keys else (getter.line, line)
    if not keys:
        keys, second = _chain_keys(getter)
    numbers = sorted({int(key) for key in keys if key.isdigit()})
    if not numbers:
        return
    at, also = (getter.module, first), [(getter.module, second)]
    note = f"{getter.name} has a module for these; any other raises"
    yield reader.fact(operation, "supported_cc", numbers, at, also=also, scope=getter.scope, note=note, derived=True)
    for value, when, rewrite in _rewrites(getter):
        yield reader.fact(operation, "module_override", value, (getter.module, rewrite), when=when, scope=getter.scope)


def _dict_keys(getter: Definition) -> tuple[list[str], int]:
    """Keys of the first local dict that maps strings to generator names, and its line."""
    for node in getter.node.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if keys:
                return keys, node.lineno
    return [], getter.line


def _chain_keys(getter: Definition) -> tuple[list[str], int]:
    """Strings that the if/elif chain on the first parameter compares it with, and the line of the chain."""
    if not getter.node.args.args:
        return [], getter.line
    parameter, keys, first = getter.node.args.args[0].arg, [], getter.line
    for node in getter.node.body:
        while isinstance(node, ast.If):
            found = _compared_strings(node.test, parameter)
            if found and not keys:
                first = node.lineno
            keys += found if "gen_" in " ".join(_called_names(ast.Module(node.body, []))) else []
            node = node.orelse[0] if len(node.orelse) == 1 else None
    return keys, first


def _compared_strings(test: ast.expr, parameter: str) -> list[str]:
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == parameter):
        return []
    return [node.value for node in ast.walk(test.comparators[0]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _built_for(reader: Reader, operation: str, getter: Definition) -> Iterator[Fact]:
    """`built_for_majors`: the majors that the module behind an operation compiles for, per capability where a table decides."""
    for generator, keys in _generators(getter).items():
        found = reader.function(getter.module, generator)
        for definition, value, line in _asked_majors(reader, found, depth=2) if found else ():
            when = {"cc": [int(key) for key in keys if key.isdigit()]} if keys else {}
            at, also = (definition.module, line), [(getter.module, getter.line)]
            yield reader.fact(operation, "built_for_majors", value, at, when=when, also=also, note=generator, derived=True)


def _generators(getter: Definition) -> dict[str, list[str]]:
    """Generator -> capability strings for which the getter calls it; an empty list where it always does."""
    found: dict[str, list[str]] = {}
    parameter = getter.node.args.args[0].arg if getter.node.args.args else ""
    for node in getter.node.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, name in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(str(key.value))
        while isinstance(node, ast.If):
            for name in _called_names(ast.Module(node.body, [])):
                if name.startswith("gen_"):
                    found.setdefault(name, []).extend(_compared_strings(node.test, parameter))
            node = node.orelse[0] if len(node.orelse) == 1 else None
    called = _called_names(getter.node)
    inner = (getter.module.definitions[name] for name in called if name in getter.module.definitions)
    reached = called.union(*(_called_names(definition.node) for definition in inner))  # a cached `_impl` may stand between
    always = {name for name in reached if name.startswith("gen_") and name not in found}
    return found | {name: [] for name in always}


def _asked_majors(reader: Reader, definition: Definition, depth: int) -> list[tuple[Definition, list, int]]:
    """(function, majors, line) where a generator, or a function that it calls, asks for majors."""
    found = [
        (definition, value, keyword.value.lineno)
        for call in ast.walk(definition.node)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "supported_major_versions" and (value := reader.literal(definition.module, keyword.value)) is not None
    ]
    if found or not depth:
        return found
    called = (reader.function(definition.module, name) for name in sorted(_called_names(definition.node)))
    return [
        row
        for inner in called
        if inner and not isinstance(inner.node, ast.ClassDef)
        for row in _asked_majors(reader, inner, depth - 1)
    ]


def _rewrites(getter: Definition) -> Iterator[tuple[str, dict, int]]:
    """(text, when, line) for each place that replaces the capability string before the lookup."""
    if not getter.node.args.args:
        return
    parameter = getter.node.args.args[0].arg
    for outer in (node for node in getter.node.body if isinstance(node, ast.If)):
        strings = [int(text) for text in _compared_strings(outer.test, parameter) if text.isdigit()]
        for inner in [outer, *(node for node in ast.walk(outer) if isinstance(node, ast.If) and node is not outer)]:
            for node in inner.body:
                if (
                    isinstance(node, ast.Assign)
                    and ast.unparse(node.targets[0]) == parameter
                    and isinstance(node.value, ast.Constant)
                ):
                    condition = "" if inner is outer else f" when {ast.unparse(inner.test)}"
                    yield f"{node.value.value}{condition}", {"cc": strings}, node.lineno


def _majors(reader: Reader, module: Module) -> Iterator[Fact]:
    """`supported_major_versions=[...]`, under the function and, where only one build has that name, under the bare kernel name."""
    rows = []
    for definition in module.definitions.values():
        if isinstance(definition.node, ast.ClassDef) or not is_on_topic(definition):
            continue
        for call in (node for node in ast.walk(definition.node) if isinstance(node, ast.Call)):
            for keyword in call.keywords:
                value = reader.literal(module, keyword.value) if keyword.arg == "supported_major_versions" else None
                if value is not None:
                    rows.append((definition, value, keyword.value.lineno))
    kernels = [_kernel_name(definition.name) for definition, _, _ in rows]
    for (definition, value, line), kernel in zip(rows, kernels, strict=True):
        also, scope = [(module, definition.line)], definition.scope
        yield reader.fact(f"jit:{definition.name}", "supported_majors", value, (module, line), also=also, scope=scope)
        if kernels.count(kernel) == 1 and kernel not in ("", definition.name):
            yield reader.fact(f"jit:{kernel}", "supported_majors", value, (module, line), also=also, scope=scope)


def _kernel_name(function: str) -> str:
    """`trtllm_gen_fused_moe` for gen_trtllm_gen_fused_moe_sm100_module and for trtllm_gen_fused_moe_build_inputs."""
    return re.sub(r"(_sm\d+\w*)?(_module|_build_inputs)$", "", function.removeprefix("gen_"))


def _predicates(reader: Reader, operation: Definition, functions: dict[str, Definition]) -> Iterator[Fact]:
    """`gate_py`: `is_X_supported` beside an operation whose name holds the words of X, with a test that turns a capability away."""
    words = set(operation.name.split("_"))
    for name, found in functions.items():
        about = re.fullmatch(r"is_(\w+)_supported", name)
        if about is None or not set(about[1].split("_")) <= words:
            continue
        values = single_assignments(found.node)
        called = name in _called_names(operation.node)
        note = "called by the operation" if called else "offered to callers; the operation does not call it, so it enforces nothing"
        for node in found.node.body:
            if (
                isinstance(node, ast.If)
                and ast.unparse(node.body[0]) == "return False"
                and (text := _capability_text(node.test, values))
            ):
                at = (found.module, node.lineno)
                said = f"{name} false when {text}"
                yield reader.fact(operation.name, "gate_py", said, at, scope=found.scope, note=note, derived=True)


def _capability_text(test: ast.expr, values: dict[str, ast.expr]) -> str | None:
    """A test on the major in plain words, where the compared name was assigned from `get_compute_capability`."""
    for name in {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}:
        value = values.get(name)
        element = value.value if isinstance(value, ast.Subscript) else value
        if isinstance(element, ast.Call) and "compute_capability" in ast.unparse(element.func):
            return ast.unparse(test).replace(f"{name}[0]", "major").replace(f"{name}[1]", "minor")
    return None


def _refusals(reader: Reader, definition: Definition) -> Iterator[Fact]:
    """`raises_on`: a guard of the operation itself that compares the capability."""
    values = single_assignments(definition.node)
    for node, outer in guards(definition.node.body):
        text = _capability_text(node.test, values)
        if text is None:
            continue
        raised = node.body[-1]
        exact = re.fullmatch(r"major == (\d+) and minor == (\d+)", text)
        only = re.fullmatch(r"major == (\d+)", text)
        when = {"cc": [int(exact[1]) * 10 + int(exact[2])]} if exact else {"cc_major": int(only[1])} if only else {}
        given = f" when {' and '.join(outer)}" if outer else ""
        said = f"{text}{given} -> {exception_of(raised)}: {message_of(raised)}"
        at, also = (definition.module, raised.lineno), [(definition.module, node.lineno)]
        yield reader.fact(definition.name, "raises_on", said, at, when=when, also=also, scope=definition.scope)
