"""All facts of one SGLang version: each construct has its reader in `source.sglang`, this file joins them."""

import importlib
import pkgutil

from nvfp4lab.source import report, sglang
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.index import Index, no_garbage_collection
from nvfp4lab.source.package import Package
from nvfp4lab.source.sglang.reading import Reading


def readers() -> list:
    """The modules of `source.sglang` that have a `read(reading)`, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(sglang.__path__))
    modules = [importlib.import_module(f"{sglang.__name__}.{name}") for name in names]
    return [module for module in modules if hasattr(module, "read")]


def read(package: Package, index: Index | None = None) -> list[Fact]:
    """Facts of one SGLang, without importing it. `index`: reuse one that is already there.

    What a version does not have is a fact of its own (predicate `not_found`). Members that do not parse are in
    `index.unparsable`. Raises LabError when the package cannot be read.
    """
    with no_garbage_collection():
        reading = Reading(index or Index(package))
        return report.distinct([fact for module in readers() for fact in module.read(reading)])


def read_cached(package: Package) -> list[Fact]:
    """As `read`, kept by the content of the package and of the readers."""
    return report.facts_of(package, read)[0]
