"""Exact requirements of a package: `name==version` lines of its METADATA or pyproject.toml."""

import re

from nvfp4lab.source.package import Package

PIN = r"""^(?:Requires-Dist:\s*|\s*["'])({name})(?:\[[\w,-]*\])?\s*\(?\s*==\s*([^\s"';,)]+)"""


def pinned(package: Package, distribution: str) -> tuple[int, ...] | None:
    """Version that the package asks for exactly, as release numbers; None when it pins none."""
    member = package.metadata_member()
    text = package.tree.read(member).decode("utf-8", errors="replace") if member else ""
    name = "[_-]".join(map(re.escape, re.split("[_-]", distribution)))
    found = re.search(PIN.format(name=name), text, re.I | re.M)
    return numbers(found[2]) if found else None


def numbers(version: str) -> tuple[int, ...]:
    """(0, 6, 15) of "0.6.15.post1"; () of what does not begin with a number."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
