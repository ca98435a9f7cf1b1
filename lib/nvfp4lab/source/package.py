"""From what the user names to a readable tree: PyPI version, wheel file, installed folder or source checkout.

Nothing of the target is extracted, imported or executed. A wheel is read through its zip directory, member by member;
a PyPI version is fetched once through pip and kept under its sha256. Member names are always those of the wheel
(`sglang/srt/server_args.py`), whatever the layout on disk.
"""

import dataclasses
import os
import re
from pathlib import Path

from nvfp4lab.errors import LabError
from nvfp4lab.source import fetch
from nvfp4lab.source.tree import FolderTree, Tree, WheelTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one project looks on disk.

    distribution: name on PyPI. import_name: top folder. parents: where that folder lies inside a checkout.
    landmark: start of a member name without which the tree is something else. skipped: starts of member names that the
    question is not about; SGLang's diffusion server and tests define classes of the same names as its LLM server.
    words: a source member with none of them has nothing to say; empty where every member is looked at.
    """

    distribution: str
    import_name: str
    parents: tuple[str, ...]
    landmark: str
    skipped: tuple[str, ...] = ()
    words: tuple[bytes, ...] = ()


_SGLANG_WORDS = (
    b"moe",
    b"MoE",
    b"Moe",
    b"fp4",
    b"FP4",
    b"Fp4",
    b"device_capability",
    b"get_min_capability",
    b"sgl_kernel import",
    b"amx",
)

LAYOUTS = {
    "sglang": Layout("sglang", "sglang", (".", "python"), "sglang/srt/", ("sglang/multimodal_gen/", "sglang/test/"), _SGLANG_WORDS),
    "flashinfer": Layout("flashinfer-python", "flashinfer", (".",), "flashinfer/__init__.py"),
}


@dataclasses.dataclass(frozen=True)
class Package:
    """One version of one project as a tree of members.

    name: "sglang" or "flashinfer". version: from METADATA, the checkout's own files, or "unknown".
    origin: what was read, for messages. tree: its members.
    """

    name: str
    version: str
    origin: str
    tree: Tree

    def source_members(self) -> list[str]:
        """Python members that the lab's questions are about."""
        skipped = LAYOUTS[self.name].skipped
        return [name for name in self.tree.names() if name.endswith(".py") and not name.startswith(skipped)]

    def matters(self, data: bytes) -> bool:
        """Whether a source member says anything about the lab's subjects, by its bytes."""
        words = LAYOUTS[self.name].words
        return not words or any(word in data for word in words)

    def metadata_member(self) -> str | None:
        """Member that holds the requirements: the wheel's METADATA, or pyproject.toml of a checkout."""
        names = self.tree.names()
        found = [name for name in names if name.endswith(".dist-info/METADATA")] or [n for n in names if n == "pyproject.toml"]
        return found[0] if found else None


def resolve(wanted: str | os.PathLike, name: str = "sglang") -> Package:
    """Package `name` ("sglang", "flashinfer") for a VERSION, wheel file, installed folder or checkout.

    Raises LabError when the path or version does not exist, the network is away, the wheel is damaged, or the tree is
    empty or another project; the message names what was looked for and where.
    """
    layout, path = LAYOUTS[name], Path(wanted).expanduser()
    if path.is_dir():
        tree: Tree = _folder(path, layout)
    elif path.is_file():
        tree = WheelTree(path)
    elif _looks_like_version(str(wanted)):
        tree = WheelTree(fetch.wheel(layout.distribution, str(wanted)))
    else:
        raise LabError(f"{wanted}: no such file or folder, and not a version number such as 0.5.17")
    if not any(member.startswith(layout.landmark) for member in tree.names()):
        raise LabError(
            f"{wanted}: not a tree of {layout.distribution}: looked for {layout.landmark} "
            f"among {len(tree.names())} members of {tree.origin}"
        )
    return Package(name, _version(tree, layout), tree.origin, tree)


def _looks_like_version(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)*([._-]?(a|b|rc|post|dev)\d*)*(\+[\w.]+)?", text) is not None


def _folder(path: Path, layout: Layout) -> FolderTree:
    """The tree below `path`, which may be the package folder itself, its parent, or a checkout."""
    places = [path.parent] if path.name == layout.import_name else []
    places += [path / parent for parent in layout.parents]
    for place in places:
        if (place / layout.import_name).is_dir():
            return FolderTree(place.resolve(), layout.import_name)
    looked = ", ".join(str(place / layout.import_name) for place in places)
    state = "an empty folder" if not any(path.iterdir()) else f"no tree of {layout.distribution}"
    raise LabError(f"{path}: {state}: looked for {looked}")


def _version(tree: Tree, layout: Layout) -> str:
    patterns = [
        (".dist-info/METADATA", rb"^Version:\s*(\S+)"),
        (f"{layout.import_name}/_version.py", rb"^(?:__version__ = )?version = ['\"]([^'\"]+)"),
        (f"{layout.import_name}/version.py", rb"^__version__\s*=\s*['\"]([^'\"]+)"),
        (f"{layout.import_name}/_build_meta.py", rb"^__version__\s*=\s*['\"]([^'\"]+)"),
        ("pyproject.toml", rb"^version\s*=\s*['\"]([^'\"]+)"),
        ("version.txt", rb"^(\d\S*)"),
    ]
    for ending, pattern in patterns:
        for name in tree.names():
            if name.endswith(ending) and (found := re.search(pattern, tree.read(name), re.M)):
                return found[1].decode()
    return "unknown"
