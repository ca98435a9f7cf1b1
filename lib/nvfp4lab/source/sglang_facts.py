"""All facts of one SGLang version: each construct has its reader, this file joins them.

`read(package)` reads; `read_cached(package)` keeps the answer by the hash of the package's content and of these readers.
"""

import importlib
import pkgutil

from nvfp4lab.source import sglang
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.index import Index, no_garbage_collection
from nvfp4lab.source.package import Package
from nvfp4lab.source.sglang.reading import Reading


def readers():
    """The modules of `source.sglang` that have a `read`."""
    names = sorted(module.name for module in pkgutil.iter_modules(sglang.__path__))
    modules = [importlib.import_module(f"{sglang.__name__}.{name}") for name in names]
    return [module for module in modules if hasattr(module, "read")]


def read(package: Package) -> list[Fact]:
    with no_garbage_collection():
        reading = Reading(Index(package))
        return [fact for module in readers() for fact in module.read(reading)]
