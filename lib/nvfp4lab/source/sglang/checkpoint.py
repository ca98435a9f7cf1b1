"""What a checkpoint must be: capability floor, accepted algorithms, detection, layers covered, tensor types and shapes."""

import ast
from collections.abc import Iterator

from nvfp4lab.source.evaluate import Frame
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.methods import QuantMethod, methods_by_name
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, spot
from nvfp4lab.source.values import Scenario, Self


def read(reading: Reading) -> Iterator[Fact]:
    methods = methods_by_name(reading)
    if "modelopt_fp4" not in methods:
        yield reading.not_found(
            "quant:modelopt_fp4", "min_capability", 'a config whose get_name returns "modelopt_fp4"', "all modules"
        )
    for method in methods.values():
        yield from _min_capability(reading, method)
    if "modelopt_fp4" in methods:
        method = methods["modelopt_fp4"]
        yield from _accepted(reading, method.config)
        yield from _covered_layers(reading, method.config)
        yield from _tensors(reading, method.linear)
    yield from _capability_gate(reading, methods)
    yield from _scheme_refusals(reading)
    yield from _detection(reading)


def _min_capability(reading: Reading, method: QuantMethod) -> Iterator[Fact]:
    """The number that `get_min_capability` returns."""
    for owner in (method.config, method.moe):
        getter = owner.methods.get("get_min_capability") if owner else None
        for node in ast.walk(getter.node) if getter else ():
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                yield reading.fact(
                    f"quant:{method.name}", "min_capability", node.value.value, (getter.file, node.lineno), scope=getter.scope
                )
                return


def _capability_gate(reading: Reading, methods: dict[str, QuantMethod]) -> Iterator[Fact]:
    """The loader's `if capability < quant_config.get_min_capability(): raise`."""
    for module in reading.index.modules(b"get_min_capability()", b"raise", b"capability <"):
        for definition in module.functions():
            for branch in (node for node in ast.walk(definition.node) if isinstance(node, ast.If)):
                words = ast.unparse(branch.test)
                raised = next((node for node in branch.body if isinstance(node, ast.Raise)), None)
                if raised is None or "get_min_capability()" not in words or "<" not in words:
                    continue
                if "modelopt_fp4" in methods and "self" not in words:
                    floor = _floor(methods["modelopt_fp4"].config)
                    at = (module.member, raised.lineno)
                    yield reading.fact(
                        "quant:modelopt_fp4",
                        "raises_on",
                        f"GPU capability < {floor} -> {_exception(raised)} at model load",
                        at,
                        when={"cc": f"<{floor}"},
                        also=[(module.member, branch.test.lineno)],
                        scope=definition.scope,
                    )


def _floor(config: Definition) -> int | None:
    getter = config.methods.get("get_min_capability")
    returned = [node.value for node in ast.walk(getter.node) if isinstance(node, ast.Return)] if getter else []
    return returned[0].value if returned and isinstance(returned[0], ast.Constant) else None


def _exception(node: ast.Raise) -> str:
    return ast.unparse(node.exc.func) if isinstance(node.exc, ast.Call) else "exception"


def _scheme_refusals(reading: Reading) -> Iterator[Fact]:
    """compressed-tensors: the raise after `X.get_min_capability()` of the FP4 scheme was not met."""
    for module in reading.index.modules(b"CompressedTensorsW4A4", b"get_min_capability", b"_check_scheme_supported"):
        for definition in module.functions():
            for branch in (node for node in ast.walk(definition.node) if isinstance(node, ast.If)):
                words = " ".join(ast.unparse(node) for node in branch.body[:2])
                if "W4A4" not in words or "get_min_capability" not in words or "nvfp4" not in ast.unparse(branch.test).lower():
                    continue
                kind = "moe" if "moe" in definition.name.lower() else "fp4_gemm"
                for raised in (node for node in ast.walk(branch) if isinstance(node, ast.Raise)):
                    yield reading.fact(
                        f"{kind}:*:compressed-tensors-nvfp4",
                        "raises_on",
                        f"GPU capability below the scheme's -> {_exception(raised)} in {definition.name}",
                        (module.member, raised.lineno),
                        when={"cc": "<100"},
                        also=[(module.member, branch.lineno), *((module.member, node.lineno) for node in branch.body)],
                        scope=definition.scope,
                    )


def _accepted(reading: Reading, config: Definition) -> Iterator[Fact]:
    """Algorithms: `if quant_method not in [...]: raise` when the config is parsed."""
    parse = config.methods.get("from_config")
    for branch in (node for node in ast.walk(parse.node) if isinstance(node, ast.If)) if parse else ():
        listed = _refused_unless_in(branch.test) if any(isinstance(node, ast.Raise) for node in branch.body) else None
        if listed is None:
            continue
        values = reading.evaluator(Scenario()).value(listed, Frame(parse, parse.module))
        if isinstance(values, tuple) and all(isinstance(value, str) for value in values):
            at = (parse.file, branch.lineno)
            yield reading.fact("quant:modelopt_fp4", "accepted_quant_algo", list(values), at, scope=parse.scope)


def _refused_unless_in(test: ast.expr) -> ast.expr | None:
    """The collection of `x not in [...]` or `not x in [...]`."""
    wanted: type[ast.cmpop] = ast.NotIn
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, ast.In
    return test.comparators[0] if isinstance(test, ast.Compare) and isinstance(test.ops[0], wanted) else None


def _covered_layers(reading: Reading, config: Definition) -> Iterator[Fact]:
    """Layer classes that the config quantises: the `isinstance` tests of its method chooser, in this class or a base."""
    for definition in _choosers(reading, config):
        for branch in (node for node in ast.walk(definition.node) if isinstance(node, ast.If)):
            call = branch.test
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance" and "LinearBase" in ast.unparse(call.args[1]):
                names = [node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)]
                at = (definition.file, branch.lineno)
                yield reading.fact("quant:modelopt_fp4", "quantizes", " and ".join(names), at, scope=definition.scope)


def _choosers(reading: Reading, config: Definition) -> Iterator[Definition]:
    names = ("get_quant_method", "_get_quant_method")
    bases = [config.module.definitions.get(ast.unparse(base)) for base in config.node.bases]
    for owner in (config, *(base for base in bases if base is not None)):
        yield from (owner.methods[name] for name in names if name in owner.methods)


def _tensors(reading: Reading, linear: Definition | None) -> Iterator[Fact]:
    """Parameters that the linear method registers: dtype and shape as written."""
    create = linear.methods.get("create_weights") if linear else None
    if create is None:
        return
    flow = reading.flow(create, Scenario(), {"self": Self(linear)})
    made = {event.dotted: event for event in flow.of_kind("set")}
    for event in flow.of_kind("call"):
        if not event.dotted.endswith(".register_parameter") or len(event.node.args) < 2:
            continue
        name = event.node.args[0].value if isinstance(event.node.args[0], ast.Constant) else None
        source = made.get(ast.unparse(event.node.args[1]))
        if name is None or source is None:
            continue
        text, lines = _shape(create, source.node.value)
        also = [(create.file, line) for line in (source.line, *lines)]
        also += [spot(made[dtype]) for dtype in ("weight_dtype",) if dtype in text and dtype in made]
        also += [
            place for dtype in ("weight_dtype",) if dtype in text and dtype in made for place in _lines(create, made[dtype].node)
        ]
        yield reading.fact(
            f"tensor:linear.{name}", "dtype_shape", text, spot(event), also=[*also, *chain(event)], scope=create.scope
        )


def _shape(create: Definition, node: ast.expr) -> tuple[str, list[int]]:
    """`torch.empty(shape..., dtype=...)` inside a parameter's constructor, as text, with its lines."""
    for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
        if ast.unparse(call.func) in ("torch.empty", "torch.ones", "torch.zeros", "torch.full"):
            dtype = next((ast.unparse(word.value) for word in call.keywords if word.arg == "dtype"), "params dtype")
            shape = ", ".join(ast.unparse(argument) for argument in call.args)
            return f"{dtype} [{shape}]", [inner.lineno for inner in ast.walk(call) if hasattr(inner, "lineno")]
    return ast.unparse(node), [node.lineno]


def _lines(create: Definition, node: ast.AST) -> list[Spot]:
    return [(create.file, inner.lineno) for inner in ast.walk(node) if hasattr(inner, "lineno")]


def _detection(reading: Reading) -> Iterator[Fact]:
    """Where a checkpoint without config is recognised: a returned dict whose quant_method is modelopt_fp4."""
    for module in reading.index.modules(b"hf_quant_config.json", b"modelopt_fp4", b"quant_algo"):
        if "'quant_method': 'modelopt_fp4'" not in reading.index.text(module.member).replace('"', "'"):
            continue
        file_lines = [number for number, line in enumerate(module.lines, 1) if "hf_quant_config.json" in line and "exists" in line]
        for definition in module.functions():
            for node in ast.walk(definition.node):
                if (
                    isinstance(node, ast.Return)
                    and isinstance(node.value, ast.Dict)
                    and "'quant_method': 'modelopt_fp4'" in ast.unparse(node.value)
                ):
                    yield reading.fact(
                        "quant:modelopt_fp4",
                        "detected_from",
                        "hf_quant_config.json quant_algo containing FP4",
                        (module.member, node.lineno),
                        also=[(module.member, line) for line in file_lines],
                        scope=definition.scope,
                    )
