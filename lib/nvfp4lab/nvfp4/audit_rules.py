"""What a server will build for each module, read from the checkpoint's declaration by SGLang's own rules.

Three kinds of declaration (srt/layers/quantization of SGLang 0.5.17 to 0.5.23):
    ModelOpt, one algorithm: all but the ignore list (`checkpoint_modules.is_excluded`);
    ModelOpt MIXED_PRECISION: what `quantized_layers` names, less the ignore list (modelopt_quant.py, _resolve_quant_algo);
    compressed-tensors: `ignore`, then `config_groups.*.targets` by name, by class, by the shards of a fused module
    (compressed_tensors/utils.py, should_ignore_layer and find_matched_target).
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nvfp4lab.nvfp4.audit_finding import Settings
from nvfp4lab.nvfp4.checkpoint_modules import FUSED, LINEAR_LEAVES, LayerKind, Module, is_excluded, served_module

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The class that SGLang builds for a projection; a target names it in part and without regard to case.
_CLASSES = {"qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear"} | dict.fromkeys(
    ("o_proj", "down_proj", "out_proj"), "RowParallelLinear"
)
_ANY_CLASS = "ColumnParallelLinear"


@dataclasses.dataclass(frozen=True)
class Served:
    """One module as the server builds it: its path, its shards' paths, and the stored modules that it loads."""

    path: str
    shards: tuple[str, ...]
    stored: tuple[Module, ...]

    @property
    def is_routed(self) -> bool:
        return self.stored[0].is_routed

    @property
    def formats(self) -> set[str]:
        """How its parts are stored: "FP4", "FP8", "bf16"."""
        return {module.stored_as for module in self.stored}


@dataclasses.dataclass(frozen=True)
class Ruling:
    """How the server will build a module.

    algorithm: None for bf16. by: the list that decides, "ignore" or "targets". raises: why it refuses, "" if it does not.
    """

    algorithm: str | None
    by: str
    raises: str = ""

    @property
    def expects(self) -> str | None:
        """The stored format that it needs; None for one that this audit does not know."""
        if self.algorithm is None:
            return "bf16"
        if "NVFP4" in self.algorithm:
            return "FP4"
        return "FP8" if "FP8" in self.algorithm and "W4" not in self.algorithm else None

    @property
    def is_weight_only(self) -> bool:
        """Whether activations stay in bf16, so that no input_scale is needed; also where no entry says what is needed."""
        return self.algorithm.startswith("W4A16") if self.algorithm else self.by == "targets"


def served(modules: Mapping[str, Module]) -> list[Served]:
    """The quantisable modules as a server fuses them; routers and vision towers are built without quantisation."""
    groups: dict[tuple[str, tuple[str, ...]], list[Module]] = collections.defaultdict(list)
    for module in modules.values():
        if module.kind not in (LayerKind.ROUTER, LayerKind.VISION) and (module.leaf in LINEAR_LEAVES or module.is_routed):
            groups[served_module(module, modules)].append(module)
    return [
        Served(path, shards, tuple(sorted(stored, key=lambda module: shards.index(module.path) if module.path in shards else 0)))
        for (path, shards), stored in groups.items()
    ]


def rulings(units: Iterable[Served], settings: Settings) -> list[tuple[Served, Ruling]]:
    """Each module with what SGLang makes of the declaration for it. Entries that are no regular expression count for nothing."""
    bad = {entry for entry, _ in unreadable_patterns(settings)}
    settings = dataclasses.replace(
        settings,
        ignore=tuple(entry for entry in settings.ignore if entry not in bad),
        targets=tuple(pair for pair in settings.targets if pair[0] not in bad),
    )
    if settings.method == "compressed-tensors":
        return [(unit, _compressed(unit, settings)) for unit in units]
    listed = _Listed(settings.targets)
    return [(unit, _modelopt(unit, settings, listed)) for unit in units]


def _modelopt(unit: Served, settings: Settings, listed: "_Listed") -> Ruling:
    excluded = is_excluded(unit.path, unit.shards, unit.is_routed, settings.ignore)
    if excluded is None:
        why = f"the ignore list has some but not all shards of {unit.path} ({', '.join(unit.shards)})"
        return Ruling(None, "ignore", why)
    if excluded:
        return Ruling(None, "ignore")
    return listed.ruling(unit) if settings.quant_algo == "MIXED_PRECISION" else Ruling(settings.quant_algo, "ignore")


class _Listed:
    """`quantized_layers`, indexed: a large model lists every projection of every expert."""

    def __init__(self, layers: Iterable[tuple[str, str]]):
        self.of = dict(layers)
        self.first_below: dict[str, str] = {}
        for name, algorithm in self.of.items():
            while name := name.rpartition(".")[0]:
                self.first_below.setdefault(name, algorithm)

    def ruling(self, unit: Served) -> Ruling:
        """The module itself, else its shards, else the first entry below it."""
        paths = with_prefixes(unit.path)
        if itself := next((self.of[path] for path in paths if path in self.of), None):
            return Ruling(itself, "targets")
        found = {self.of[path]: None for shard in unit.shards for path in with_prefixes(shard) if path in self.of}
        if len(found) > 1:
            why = f"quantized_layers gives the shards of {unit.path} several algorithms: {', '.join(found)}"
            return Ruling(None, "targets", why)
        below = (self.first_below[path] for path in paths if path in self.first_below)
        return Ruling(next(iter(found), None) or next(below, None), "targets")


def with_prefixes(path: str) -> tuple[str, ...]:
    """The names under which `quantized_layers` may list the module at `path`: multimodal models have several for a text layer."""
    if path.startswith("model.language_model."):
        tail = path.removeprefix("model.language_model.")
        return path, f"language_model.model.{tail}", f"model.{tail}"
    if path.startswith("language_model.model."):
        return path, "model.language_model." + path.removeprefix("language_model.model.")
    if path.startswith("model."):
        return path, "model.language_model." + path.removeprefix("model.")
    return (path, "lm_head") if path.endswith(".lm_head") else (path,)


def _compressed(unit: Served, settings: Settings) -> Ruling:
    if unit.is_routed:
        rulings = [
            _compressed_part(f"{unit.path}.0.{leaf}", (), "FusedMoE", _with_experts(settings)) for leaf in _EXPERT_PROJECTIONS
        ]
        if len({(one.algorithm, bool(one.raises)) for one in rulings}) > 1:
            return Ruling(None, rulings[0].by, f"gate, up and down projections of {unit.path} come out in several schemes")
        return rulings[0]
    leaf = unit.path.rpartition(".")[2]
    if unit.stored[0].kind is LayerKind.LM_HEAD:  # by its name alone
        named = (algorithm for target, algorithm in settings.targets if _names(target, unit.path))
        ignored = any(_names(entry, unit.path) for entry in settings.ignore)
        return Ruling(None if ignored else next(named, None), "ignore" if ignored else "targets")
    return _compressed_part(unit.path, unit.shards if leaf in FUSED else (), _CLASSES.get(leaf, _ANY_CLASS), settings)


def _with_experts(settings: Settings) -> Settings:
    """A target "Linear" also means the fused experts, unless these have one of their own."""
    targets = dict(settings.targets)
    if "Linear" in targets and "FusedMoE" not in targets:
        targets["FusedMoE"] = targets["Linear"]
    return dataclasses.replace(settings, targets=tuple(targets.items()))


def _compressed_part(path: str, shards: Sequence[str], its_class: str, settings: Settings) -> Ruling:
    parts = shards if shards and path not in settings.ignore else (path,)
    ignored = [any(_names(entry, part) for entry in settings.ignore) for part in parts]
    if any(ignored) and not all(ignored):
        return Ruling(None, "ignore", f"the ignore list has some but not all shards of {path} ({', '.join(shards)})")
    if all(ignored):
        return Ruling(None, "ignore")
    if not settings.targets:
        return Ruling(None, "targets")
    for target, algorithm in settings.targets:
        if _is(target, path):
            return Ruling(algorithm, "targets")
    for target, algorithm in settings.targets:
        if target.lower() in its_class.lower() or (pattern(target) and pattern(target).match(its_class)):
            return Ruling(algorithm, "ignore")  # all of a class: what is not meant stands in the ignore list
    by_shard = [next((algorithm for target, algorithm in settings.targets if _is(target, shard)), None) for shard in shards]
    if by_shard and all(by_shard):
        return Ruling(by_shard[0], "targets")
    return Ruling(None, "targets", f"{path} matches no target of config_groups and no entry of the ignore list")


def pattern(entry: str) -> re.Pattern[str] | None:
    """The regular expression of an entry `re:...`; None for a plain name. Raises re.error where it is none."""
    return re.compile(entry.removeprefix("re:")) if entry.startswith("re:") else None


def _is(entry: str, path: str) -> bool:
    """compressed-tensors' `_is_equal_or_regex_match`: the whole name, or a regular expression from its beginning."""
    expression = pattern(entry)
    return expression.match(path) is not None if expression else entry == path


def _names(entry: str, path: str) -> bool:
    """compressed-tensors' `check_equal_or_regex_match`: a plain name may also be the end of a path, never its beginning."""
    return _is(entry, path) or (not entry.startswith("re:") and path.endswith(f".{entry}"))


def weight_only(units: Iterable[tuple[Served, Ruling]]) -> frozenset[str]:
    """Paths of the stored modules whose activations stay in bf16."""
    return frozenset(module.path for unit, rule in units if rule.is_weight_only for module in unit.stored)


def unreadable_patterns(settings: Settings) -> Iterator[tuple[str, str]]:
    """(entry, why) of what claims to be a regular expression and is none."""
    for entry in (*settings.ignore, *(target for target, _ in settings.targets)):
        try:
            pattern(entry)
        except re.error as error:
            yield entry, str(error)
