"""What goes into a bundle: the request of the command line, and the data of `recipe.yaml` typed."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml

from nvfp4lab.errors import LabError

Package = Literal["sglang", "flashinfer"]


@dataclasses.dataclass(frozen=True)
class Module:
    """One JIT module.

    functions: places `module:function` to try, in order. minutes: on one core, for the progress line.
    """

    name: str
    package: Package
    minutes: float
    arguments: tuple[bool | int | str, ...]
    functions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The data of `recipe.yaml`."""

    alone: tuple[str, ...]
    with_requirements: tuple[str, ...]
    host_brings: tuple[str, ...]
    trim_always: tuple[str, ...]
    trim_optional: Mapping[str, tuple[str, ...]]
    trim_other_architecture: Mapping[str, tuple[str, ...]]
    modules: tuple[Module, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for.

    arch: CUDA target as SGLang spells it, "9.0a". glibc: newest C library that wheels may ask of the GPU host.
    host: packages that the GPU host has already, name -> version or None where unknown.
    """

    sglang: str
    python: str
    arch: str
    directory: Path
    glibc: str = "2.35"
    machine: str = "x86_64"
    keep: frozenset[str] = frozenset()
    host: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fixtures: tuple[str, ...] = ()
    jobs: int = 1
    split_mib: int | None = None

    def __post_init__(self):
        if not re.fullmatch(r"3\.\d+", self.python):
            raise LabError(f"--python {self.python}: needs the host's major.minor, such as 3.12", exit_code=2)
        if not re.fullmatch(r"\d+\.\d[af]?", self.arch):
            raise LabError(f"--arch {self.arch}: needs a CUDA target such as 9.0a, 10.0a or 12.0f", exit_code=2)
        if self.split_mib is not None and self.split_mib < 1:
            raise LabError(f"--split-mib {self.split_mib}: a part needs at least 1 MiB", exit_code=2)
        if self.jobs < 1:
            raise LabError(f"--jobs {self.jobs}: at least one module must be compiled at a time", exit_code=2)

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor) of the target."""
        major, minor = self.arch.rstrip("af").split(".")
        return int(major), int(minor)

    @property
    def family(self) -> str:
        """The target as FlashInfer names modules after it: "90", "100", "120f", "121"."""
        major, minor = self.capability
        return f"{major}{minor}" + ("f" if (major, minor) == (12, 0) else "")

    @property
    def bundle(self) -> Path:
        """The folder that goes to the GPU host."""
        return self.directory / "bundle"

    @property
    def site(self) -> Path:
        return self.bundle / "site"

    @property
    def scratch(self) -> Path:
        """What stays on the building machine; a second call resumes from it."""
        return self.directory / "build"


def load(path: Path | None = None) -> Recipe:
    """The recipe that ships with the lab, or the one at `path`."""
    path = path or Path(__file__).with_name("recipe.yaml")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    modules = [
        Module(item["name"], package, item["minutes"], tuple(item["arguments"]), tuple(item["function"]))
        for package, items in data["kernels"].items()
        for item in items
    ]
    trim = data["trim"]
    return Recipe(
        alone=tuple(data["packages"]["alone"]),
        with_requirements=tuple(data["packages"]["with_requirements"]),
        host_brings=tuple(data["host_brings"]),
        trim_always=tuple(trim["always"]),
        trim_optional={name: tuple(globs) for name, globs in trim["optional"].items()},
        trim_other_architecture={major: tuple(globs) for major, globs in trim["other_architecture"].items()},
        modules=tuple(sorted(modules, key=lambda module: -module.minutes)),
    )


def read_host_packages(path: Path) -> dict[str, str | None]:
    """`pip list --format=freeze` of the GPU host, or bare names, one a line -> {canonical name: version or None}."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LabError(
            f"--host-packages {path}: {error.strerror}; write it on the GPU host with `pip list --format=freeze`", 2
        ) from error
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {canonical(name): version or None for name, _, version in pairs if name}


def canonical(name: str) -> str:
    """A package name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).strip().lower()
