"""Which classes of SGLang carry a quantisation: its config, its linear method, its MoE method, and the MoE layer.

Found by construct: the table `{"modelopt_fp4": ModelOptFp4Config}`, the classes that the config's methods name, and the
function whose name says that it chooses the MoE layer's class.
"""

import ast
import dataclasses

from nvfp4lab.errors import LabError
from nvfp4lab.source.evaluate import Frame
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import Reference, Scenario, Self

_MOE_BASE, _LINEAR_BASE = "FusedMoEMethodBase", "LinearMethodBase"
_LAYER_CHOOSER = "get_moe_impl_class"
_SCHEME_SUFFIX = "-nvfp4"  # compressed-tensors-nvfp4: the scheme of a config that has several


@dataclasses.dataclass(frozen=True)
class QuantClasses:
    """The classes behind one quantisation; None where this version has no such class."""

    config: Definition
    moe: Definition | None
    linear: Definition | None


def quant_classes(reading: Reading, quant: str) -> QuantClasses:
    """Classes of an FP4 quantisation method. LabError when this version has none of that name, or it is not FP4.

    A package may hold several engines, each with its own table; the one that also has an MoE method is served.
    """
    tables = _tables(reading)
    if quant not in tables and quant.removesuffix(_SCHEME_SUFFIX) not in tables:
        known = ", ".join(sorted(tables)) or "no quantisation table at all"
        raise LabError(f"sglang {reading.version}: no quantisation {quant!r}; this version has: {known}")
    found = [_classes_of(reading, config) for config in tables.get(quant) or tables[quant.removesuffix(_SCHEME_SUFFIX)]]
    best = max(found, key=lambda classes: (classes.moe is not None) + (classes.linear is not None))
    if best.moe is None and best.linear is None:
        raise LabError(f"sglang {reading.version}: {quant!r} ({best.config.name}) names no FP4 class; routes are read for FP4 only")
    return best


def _classes_of(reading: Reading, config: Definition) -> QuantClasses:
    """FP4 classes that the config names, or the FP4 schemes beside it where it chooses among schemes."""
    named = [*_chosen_classes(reading, config), *_named_classes(reading, config)]
    named = [definition for definition in named if _is_nvfp4(definition)]
    moe = next((found for found in named if _MOE_BASE in _base_names(reading, found)), None)
    linear = next((found for found in named if _LINEAR_BASE in _base_names(reading, found)), None)
    if moe is None and linear is None:
        schemes = _schemes(reading, config)
        moe = next((found for found in schemes if any(name.endswith("MoEScheme") for name in _base_names(reading, found))), None)
        linear = next(
            (found for found in schemes if any(name.endswith("LinearScheme") for name in _base_names(reading, found))), None
        )
    return QuantClasses(config, moe, linear)


def _is_nvfp4(definition: Definition) -> bool:
    name = definition.name.lower()
    return "fp4" in name and "mxfp4" not in name


def _schemes(reading: Reading, config: Definition) -> list[Definition]:
    """NVFP4 weight and activation schemes (`...W4A4...Fp4...`) that the module of a config imports."""
    imported = (reading.index.resolve(target.dotted) for targets in config.module.imports.values() for target in sorted(targets))
    classes = [found for found in imported if found is not None and isinstance(found.node, ast.ClassDef)]
    return [found for found in classes if "w4a4" in found.name.lower() and _is_nvfp4(found)]


def _chosen_classes(reading: Reading, config: Definition) -> list[Definition]:
    """Classes that `get_quant_method` passes on or makes for a checkpoint that is quantised already."""
    owner, scenario = Self(config), Scenario()
    if "__init__" in config.methods:
        reading.flow(config.methods["__init__"], scenario, {"self": owner, "is_checkpoint_nvfp4_serialized": True})
    entry = config.methods.get("get_quant_method")
    if entry is None:
        return []
    flow = reading.flow(entry, scenario, {"self": owner})
    evaluator, frame = reading.evaluator(scenario), Frame(entry, entry.module, flow.env)
    values = [evaluator.value(keyword.value, frame) for event in flow.of_kind("call") for keyword in event.node.keywords]
    found = [reading.index.resolve(value.dotted) for value in values if isinstance(value, Reference)]
    return [definition for definition in found if definition is not None and isinstance(definition.node, ast.ClassDef)]


def _tables(reading: Reading) -> dict[str, list[Definition]]:
    """Quantisation name -> config classes, from every module-level dict of strings to `...Config` names."""
    found: dict[str, list[Definition]] = {}
    for module in reading.index.modules(b"QUANTIZATION_METHODS"):
        for rows in module.constants.values():
            for table in (node.value for node in rows if isinstance(node.value, ast.Dict)):
                for key, value in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Name) and value.id.endswith("Config"):
                        definition = _class(reading, module.imports, module.definitions, value.id)
                        if definition is not None:
                            found.setdefault(str(key.value), []).append(definition)
    return found


def _class(reading: Reading, imports: dict, definitions: dict, name: str) -> Definition | None:
    if name in definitions:
        return definitions[name]
    targets = sorted(imports.get(name, ()))
    return next((found for target in targets if (found := reading.index.resolve(target.dotted))), None)


def _named_classes(reading: Reading, config: Definition) -> list[Definition]:
    """Classes that the config's `get_quant_method` names, then those of its other methods, in order of the text."""
    methods = sorted(config.methods.values(), key=lambda method: (method.name != "get_quant_method", method.line))
    found: dict[str, Definition] = {}
    for method in methods:
        names = sorted(
            (node for node in ast.walk(method.node) if isinstance(node, ast.Name)), key=lambda n: (n.lineno, n.col_offset)
        )
        for node in names:
            definition = _class(reading, method.imports, config.module.definitions, node.id)
            if definition is not None and isinstance(definition.node, ast.ClassDef):
                found.setdefault(definition.name, definition)
    return list(found.values())


def bases(reading: Reading, definition: Definition) -> list[Definition]:
    """The class and its bases as far as the package defines them, nearest first."""
    found, waiting = [], [definition]
    while waiting:
        current = waiting.pop(0)
        if current in found or not isinstance(current.node, ast.ClassDef):
            continue
        found.append(current)
        for base in current.node.bases:
            resolved = _class(reading, current.module.imports, current.module.definitions, ast.unparse(base).split("[")[0])
            if resolved is not None:
                waiting.append(resolved)
    return found


def _base_names(reading: Reading, definition: Definition) -> set[str]:
    return {ast.unparse(base) for current in bases(reading, definition) for base in current.node.bases} | {definition.name}


def method(reading: Reading, owner: Definition, name: str) -> Definition | None:
    """A method of a class or of the nearest base that has it."""
    return next((found.methods[name] for found in bases(reading, owner) if name in found.methods), None)


def apply_of(reading: Reading, owner: Definition, name: str = "apply") -> Definition | None:
    """The forward entry of a quantisation method; schemes call it `apply_weights`."""
    return method(reading, owner, name) or method(reading, owner, "apply_weights")


def moe_layer(reading: Reading, config: Definition, scenario: Scenario) -> tuple[Definition | None, Definition | None, int]:
    """(class of the MoE layer, the function that chooses it, line of its return) for one scenario; None where not found."""
    chooser = next(iter(reading.index.functions(_LAYER_CHOOSER)), None)
    if chooser is None:
        return None, None, 0
    flow = reading.flow(chooser, scenario, {"quant_config": Self(config)})
    certain = [event for event in flow.of_kind("return") if isinstance(event.value, Reference)]
    if len({event.value for event in certain}) != 1:
        certain = [event for event in certain if not event.guards]
    if not certain:
        return None, chooser, chooser.line
    return reading.index.resolve(certain[-1].value.dotted), chooser, certain[-1].line
