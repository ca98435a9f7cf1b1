"""Which members matter, and what they define: byte prefilter first, `ast` only for the members that are asked for.

`Index(package)` unpacks the Python members once into memory. `mentioning(b"word", ...)` finds candidates by bytes;
`module(member)` parses one on first use. So the cost grows with the files that matter, not with the tree.
A member that does not parse is kept in `unparsable` with its reason, and the rest is read.
"""

import ast
import contextlib
import functools
import gc
import itertools
import re
import time
import warnings
from collections.abc import Iterator

from nvfp4lab.source.facts import Place
from nvfp4lab.source.module import Definition, Module
from nvfp4lab.source.package import Package

_DEFINED = re.compile(rb"^(?:class|def|async def) (\w+)", re.M)


class Index:
    """Members of one package, parsed on demand.

    unparsable: {member: reason}. files_read: members unpacked and searched; lines_parsed, files_parsed: what was parsed of
    them so far. seconds_parsing: how long `ast` took for it.
    """

    def __init__(self, package: Package):
        self.package = package
        self.unparsable: dict[str, str] = {}
        self.lines_parsed = 0
        self.seconds_parsing = 0.0
        self._members = frozenset(package.source_members())
        self.files_read = len(self._members)
        self._bytes: dict[str, bytes] = {}
        self._sizes_bytes: dict[str, int] = {}
        for name in sorted(self._members):
            data = package.tree.read(name)
            self._sizes_bytes[name] = len(data)
            if package.matters(data):
                self._bytes[name] = data
        self._modules: dict[str, Module | None] = {}
        self._lines: dict[str, list[str]] = {}
        self._calls: dict[int, list[ast.Call]] = {}  # by id: the modules keep their nodes alive
        self._mentions: dict[bytes, list[str]] = {}

    @property
    def files_parsed(self) -> int:
        return sum(module is not None for module in self._modules.values())

    def parse_rest(self, limit_bytes: float = 1 << 20) -> None:
        """Parse what nobody asked for, so that it is reported when it does not parse: the smallest members, `limit_bytes` in all.

        A small tree is parsed whole; in a large one this costs a tenth of a second, and `bytes_unparsed` tells what is left.
        """
        rest = sorted((size, member) for member, size in self._sizes_bytes.items() if member not in self._modules)
        for (_, member), total in zip(rest, itertools.accumulate(size for size, _ in rest), strict=True):
            if total > limit_bytes:
                break
            self.module(member)

    @property
    def bytes_unparsed(self) -> int:
        """Size of the members that nobody asked for: searched by bytes, and whether they parse is not known."""
        return sum(size for member, size in self._sizes_bytes.items() if member not in self._modules)

    def mentioning(self, first: bytes, *others: bytes) -> list[str]:
        """Members whose bytes contain every word. Name the rarest first: only what has it is searched for the others."""
        if first not in self._mentions:
            self._mentions[first] = sorted(name for name, data in self._bytes.items() if first in data)
        return [name for name in self._mentions[first] if all(word in self._bytes[name] for word in others)]

    def search(self, pattern: bytes, *words: bytes) -> list[str]:
        """Members that contain every word and in whose bytes the regular expression is found (multi-line mode)."""
        return [name for name in self.mentioning(*words) if re.search(pattern, self._bytes[name], re.M)]

    def text(self, member: str) -> str:
        """A member's source text."""
        return self._data(member).decode("utf-8", errors="replace")

    def _data(self, member: str) -> bytes:
        """Bytes of a member; one that the search leaves out is read when a name leads to it."""
        return self._bytes[member] if member in self._bytes else self.package.tree.read(member)

    def module(self, member: str) -> Module | None:
        """The parsed member; None when there is no such member or it does not parse (see `unparsable`)."""
        if member not in self._modules:
            self._modules[member] = self._parse(member) if member in self._members else None
        return self._modules[member]

    def _parse(self, member: str) -> Module | None:
        started = time.perf_counter()
        data = self._data(member)
        try:
            with no_garbage_collection(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SyntaxWarning of the target's string escapes is not our user's business
                tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.unparsable[member] = " ".join(str(error).split()) or type(error).__name__
            return None
        finally:
            self.seconds_parsing += time.perf_counter() - started
        self.lines_parsed += data.count(b"\n") + 1
        return Module(member, tree, data.decode("utf-8", errors="replace").splitlines())

    def modules(self, *words: bytes) -> Iterator[Module]:
        """Parsed members that contain every word."""
        return (module for name in self.mentioning(*words) if (module := self.module(name)))

    def by_dotted(self, dotted: str) -> Module | None:
        """The member that `import dotted` would load."""
        path = dotted.replace(".", "/")
        return self.module(f"{path}.py") or self.module(f"{path}/__init__.py")

    @functools.cached_property
    def _homes(self) -> dict[bytes, list[str]]:
        """Members by the names that they define at the start of a line."""
        found: dict[bytes, list[str]] = {}
        for member, data in self._bytes.items():
            for name in _DEFINED.findall(data):
                found.setdefault(name, []).append(member)
        return found

    def classes(self, name: str) -> list[Definition]:
        """All top-level classes of that name in the package."""
        return [found for found in self._definitions(name) if isinstance(found.node, ast.ClassDef)]

    def functions(self, name: str) -> list[Definition]:
        """All top-level functions of that name in the package."""
        return [found for found in self._definitions(name) if not isinstance(found.node, ast.ClassDef)]

    def _definitions(self, name: str) -> list[Definition]:
        modules = [self.module(member) for member in dict.fromkeys(self._homes.get(name.encode(), ()))]
        return [module.definitions[name] for module in modules if module is not None and name in module.definitions]

    def resolve(self, dotted: str, hops: int = 6) -> Definition | None:
        """The class or function that a dotted name denotes, following re-exports through at most `hops` modules."""
        home, _, name = dotted.rpartition(".")
        module = self.by_dotted(home) if home else None
        if module is None:
            return None
        if name in module.definitions:
            return module.definitions[name]
        for target in sorted(module.imports.get(name, ())):
            if hops and target.dotted != dotted and (found := self.resolve(target.dotted, hops - 1)):
                return found
        return None

    def calls_in(self, node: ast.expr) -> list[ast.Call]:
        """Calls inside an expression, inner ones first; remembered, for one function is read for many scenarios."""
        if id(node) not in self._calls:
            self._calls[id(node)] = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)][::-1]
        return self._calls[id(node)]

    def place(self, member: str, line: int) -> Place:
        """The line of a member with its text as evidence. Needs no parsing."""
        if member not in self._lines:
            module = self._modules.get(member)
            self._lines[member] = module.lines if module else self.text(member).splitlines()
        lines = self._lines[member]
        return Place(member, line, lines[line - 1].strip() if 0 < line <= len(lines) else "")


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A reading keeps millions of nodes alive; scanning them again and again doubles its time and frees nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
