"""Which classes apply NVFP4: the linear and MoE method of each quantisation, found through what the config returns."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading, per_reading

_SCHEME_NAMES = re.compile(r"^class (CompressedTensorsW4A4\w*)\b", re.M)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantMethod:
    """One NVFP4 quantisation. name: as facts call it. Any class may be absent in a version.

    config: says the least capability and parses the checkpoint. apply: name of the MoE class's forward method.
    """

    name: str
    config: Definition | None
    linear: Definition | None
    moe: Definition | None
    apply: str


def nvfp4_methods(reading: Reading) -> list[QuantMethod]:
    """ModelOpt NVFP4 and compressed-tensors NVFP4, as far as the version has them."""
    return [method for method in (modelopt(reading), _compressed_tensors(reading)) if method is not None]


def modelopt(reading: Reading) -> QuantMethod | None:
    """Through the config class whose `get_name` returns "modelopt_fp4"."""
    found = []
    for config in _configs_named(reading, "modelopt_fp4"):
        getter = config.methods.get("get_quant_method")
        classes = _classes_named_in(reading, getter) if getter else []
        found.append(QuantMethod("modelopt_fp4", config, _pick(classes, "Linear"), _pick(classes, "MoE"), "apply"))
    # plug-ins may reuse the name; the method that serves most kinds of layers is the package's own
    return max(found, key=lambda method: (method.moe is not None) + (method.linear is not None), default=None)


def _configs_named(reading: Reading, name: str) -> Iterator[Definition]:
    for module in reading.index.modules(b"def get_name", f'"{name}"'.encode()):
        for definition in module.definitions.values():
            getter = definition.methods.get("get_name") if isinstance(definition.node, ast.ClassDef) else None
            returned = [node.value for node in ast.walk(getter.node) if isinstance(node, ast.Return)] if getter else []
            if any(isinstance(value, ast.Constant) and value.value == name for value in returned):
                yield definition


def _classes_named_in(reading: Reading, getter: Definition) -> list[Definition]:
    """Classes that a `get_quant_method` names, the alternatives of conditional expressions last to first."""
    found = []
    for node in ast.walk(getter.node):
        if isinstance(node, ast.Name) and re.search(r"Method$", node.id):
            definition = getter.module.definitions.get(node.id)
            if definition is None:
                targets = sorted(getter.imports.get(node.id, ()))
                definition = next((hit for target in targets if (hit := reading.index.resolve(target.dotted))), None)
            if definition is not None and isinstance(definition.node, ast.ClassDef):
                found.append(definition)
    return found


def _pick(classes: list[Definition], kind: str) -> Definition | None:
    """The class of that kind, told by its base; W4A16 variants and the unquantised method are other methods."""
    fitting = [
        definition
        for definition in classes
        if any(
            kind.lower() in ast.unparse(base).lower() and "method" in ast.unparse(base).lower() for base in definition.node.bases
        )
        and not re.search(r"A16|Unquantized", definition.name)
    ]
    return fitting[0] if fitting else None


def _compressed_tensors(reading: Reading) -> QuantMethod | None:
    """Scheme classes for 4-bit float weights and activations; named by the bits they handle."""
    schemes: list[Definition] = []
    for member in reading.index.mentioning(b"class CompressedTensorsW4A4"):
        for name in _SCHEME_NAMES.findall(reading.index.text(member)):
            if "fp4" in name.lower() and "mx" not in name.lower() and (module := reading.index.module(member)):
                schemes.append(module.definitions[name])
    linear = next((scheme for scheme in schemes if "moe" not in scheme.name.lower()), None)
    moe = next((scheme for scheme in schemes if "moe" in scheme.name.lower()), None)
    if linear is None and moe is None:
        return None
    apply = "apply_weights" if moe and "apply_weights" in moe.methods else "apply"
    return QuantMethod("compressed-tensors-nvfp4", linear, linear, moe, apply)


@per_reading
def methods_by_name(reading: Reading) -> dict[str, QuantMethod]:
    """The same by name, found once per reading."""
    return {method.name: method for method in nvfp4_methods(reading)}
