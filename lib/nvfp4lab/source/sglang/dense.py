"""Dense NVFP4 GEMM: the kernel behind each `--fp4-gemm-backend`, how activations are quantised, and what raises."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from nvfp4lab.source import capability
from nvfp4lab.source.evaluate import Frame
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition, Import, statements
from nvfp4lab.source.sglang import kernel_call
from nvfp4lab.source.sglang.kernel_call import KernelCall
from nvfp4lab.source.sglang.methods import QuantMethod, methods_by_name
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, condition, spot
from nvfp4lab.source.values import Scenario, Self

_FIELD = "fp4_gemm_runner_backend"
_CCS = tuple((major, 0) for major in capability.MAJORS)
_QUANTIZER = re.compile(r"fp4_quant(ize)?$")


def read(reading: Reading) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get("fp4_gemm")
    for method in methods_by_name(reading).values():
        apply = _forward(method)
        if enum is None or apply is None:
            yield reading.not_found(f"fp4_gemm:*:{method.name}", "final_call", "the linear method's apply", method.name)
            continue
        for backend in enum.members.values():
            if backend != "auto":
                yield from _kernel(reading, method, apply, backend)
        yield from _refusals(reading, method, list(enum.members.values()))
        yield from _creation(reading, method)
        yield from _activation(reading, method, apply)


def _forward(method: QuantMethod) -> Definition | None:
    methods = method.linear.methods if method.linear else {}
    return methods.get("apply") or methods.get("apply_weights")


def _flow(reading: Reading, method: QuantMethod, name: str, backend: str, cc: capability.Capability) -> Flow | None:
    definition = method.linear.methods.get(name)
    return reading.flow(definition, Scenario.of(cc, **{_FIELD: backend}), {"self": Self(method.linear)}) if definition else None


def _kernel(reading: Reading, method: QuantMethod, apply: Definition, backend: str) -> Iterator[Fact]:
    subject = f"fp4_gemm:{backend}:{method.name}"
    flow = _flow(reading, method, apply.name, backend, (10, 0))
    kernel = kernel_call.find(reading, flow, Scenario.of((10, 0), **{_FIELD: backend}))
    if kernel is None:
        return
    last = kernel.hops[-1]
    also = [*kernel.also(), *kernel_call.imported_at(last.definition, kernel.dotted)]
    yield reading.fact(subject, "final_call", kernel.dotted, kernel.spot, also=also, scope=last.definition.scope, derived=True)
    yield from _kernel_gates(reading, subject, kernel)
    yield from _missing_package(reading, method, kernel)


def _kernel_gates(reading: Reading, subject: str, kernel: KernelCall) -> Iterator[Fact]:
    """Capability checks that the kernel's own module makes before it compiles."""
    home = reading.index.by_dotted(kernel.dotted.rpartition(".")[0])
    for definition in home.functions() if home else ():
        if "get_device_capability" not in ast.unparse(definition.node):
            continue
        for event in reading.flow(definition, Scenario()).of_kind("raise"):
            text = f"{condition(event)} -> {event.dotted}"
            yield reading.fact(
                subject, "raises_on", text, spot(event), when=_major_limit(event), also=chain(event), scope=definition.scope
            )


def _major_limit(event: Event) -> dict[str, str]:
    found = re.fullmatch(r"major (<|<=|>|>=) (\d+)", event.guards[-1].text) if event.guards else None
    return {"cc_major": f"{found[1]}{found[2]}"} if found else {}


def _missing_package(reading: Reading, method: QuantMethod, kernel: KernelCall) -> Iterator[Fact]:
    """A raise that is taken only when an import failed: guarded by a name that an `except ImportError` sets."""
    definition = kernel.hops[-1].definition
    failed = {
        target.id: handler.lineno
        for node in statements(definition.module.tree.body)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        for statement in handler.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for branch in (node for node in ast.walk(definition.node) if isinstance(node, ast.If)):
        raised = next((statement for statement in branch.body if isinstance(statement, ast.Raise)), None)
        names = {node.id for node in ast.walk(branch.test) if isinstance(node, ast.Name)} & set(failed)
        if raised is not None and names:
            text = f"{ast.unparse(branch.test)}: import of {kernel.dotted.split('.')[0]} failed -> {_raised(raised)}"
            also = [(definition.file, branch.lineno), *((definition.file, failed[name]) for name in names)]
            yield reading.fact(
                f"fp4_gemm:*:{method.name}",
                "raises_on",
                text,
                (definition.file, raised.lineno),
                when={"flashinfer_importable": False},
                also=also,
                scope=definition.scope,
            )


def _raised(node: ast.Raise) -> str:
    return ast.unparse(node.exc.func) if isinstance(node.exc, ast.Call) else "exception"


def _refusals(reading: Reading, method: QuantMethod, backends: list[str]) -> Iterator[Fact]:
    """Raises of weight preparation that depend on the capability: for one backend, or for a whole family of them."""
    refused: dict[Spot, dict[str, list[capability.Capability]]] = defaultdict(lambda: defaultdict(list))
    events: dict[Spot, Event] = {}
    for backend in backends:
        for cc in _CCS:
            flow = _flow(reading, method, "process_weights_after_loading", backend, cc)
            for event in flow.of_kind("raise") if flow else ():
                if not event.guards:
                    refused[spot(event)][backend].append(cc)
                    events[spot(event)] = event
    for at, by_backend in refused.items():
        event = events[at]
        ccs = next(iter(by_backend.values()))
        family = {backend for backend in backends if backend.startswith("flashinfer_")}
        names = ["flashinfer_*"] if family <= set(by_backend) else []
        when = (capability.when(ccs, _CCS) or [{}])[-1]
        for name in [*names, *by_backend]:
            yield reading.fact(
                f"fp4_gemm:{name}:{method.name}",
                "raises_on",
                event.dotted,
                at,
                when=when,
                also=chain(event),
                scope=event.definition.scope,
            )


def _creation(reading: Reading, method: QuantMethod) -> Iterator[Fact]:
    """Shape conditions when the parameters are created."""
    create = method.linear.methods.get("create_weights")
    for event in reading.flow(create, Scenario(), {"self": Self(method.linear)}).of_kind("raise") if create else ():
        if event.guards:
            text = f"not ({ast.unparse(event.guards[-1].test)}) ({event.dotted})"
            for predicate in ("requires", "raises_on"):
                yield reading.fact(
                    f"fp4_gemm:*:{method.name}", predicate, text, spot(event), also=chain(event), scope=event.definition.scope
                )


def _activation(reading: Reading, method: QuantMethod, apply: Definition) -> Iterator[Fact]:
    """The quantiser that `apply` calls: FlashInfer's directly, or SGLang's wrapper with a backend of its choice."""
    subject = f"fp4_gemm:*:{method.name}"
    for cc in _CCS:
        flow = _flow(reading, method, apply.name, "flashinfer_cutlass", cc)
        call = next((event for event in flow.of_kind("call") if _QUANTIZER.search(event.dotted)), None)
        if call is None:
            continue
        name = ast.unparse(call.node.func)
        for target in sorted(apply.imports.get(name, ())):
            if not _is_imported_on(reading, apply, target, cc):
                continue
            yield from _quantizer(reading, subject, apply, call, target, cc)


def _is_imported_on(reading: Reading, apply: Definition, target: Import, cc: capability.Capability) -> bool:
    """Whether the module-level conditions around an import hold for a capability; an `except` branch does not count."""
    evaluator, frame = reading.evaluator(Scenario.of(cc)), Frame(None, apply.module)
    for node in statements(apply.module.tree.body):
        if isinstance(node, ast.If):
            decided = evaluator.truth(node.test, frame) if _holds_line([*node.body, *node.orelse], target.line) else None
            if decided is not None and not _holds_line(node.body if decided else node.orelse, target.line):
                return False
        elif isinstance(node, ast.Try) and any(_holds_line(handler.body, target.line) for handler in node.handlers):
            return False
    return True


def _holds_line(body: list[ast.stmt], line: int) -> bool:
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in body)


def _quantizer(
    reading: Reading, subject: str, apply: Definition, call: Event, target: Import, cc: capability.Capability
) -> Iterator[Fact]:
    import_line = (apply.file, target.line)
    wrapper = reading.index.resolve(target.dotted)
    if not target.dotted.startswith("sglang.") or (wrapper is not None and isinstance(wrapper.node, ast.FunctionDef)):
        value = wrapper.dotted if wrapper is not None else target.dotted
        yield reading.fact(
            subject, "activation_quant", value, import_line, when={"cc_major": cc[0]}, also=chain(call), scope=apply.scope
        )
        return
    home = reading.index.by_dotted(target.dotted.rpartition(".")[0])
    for name, assigned in home.constants.items() if home else ():
        node = assigned[-1].value
        if "quantize" in name and name.endswith("backend") and isinstance(node, ast.IfExp):
            backend = reading.evaluator(Scenario.of(cc)).value(node, Frame(None, home))
            value = f'flashinfer.fp4_quantize(backend="{backend}")'
            imports = [(home.member, line.line) for line in sorted(home.imports.get("_flashinfer_fp4_quantize", ()))]
            yield reading.fact(
                subject,
                "activation_quant",
                value,
                (home.member, node.lineno),
                when={"cc_major": cc[0]},
                also=[*imports, import_line],
            )
