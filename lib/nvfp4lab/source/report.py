"""One reading of one package with its cost; kept on disk by the hash of the package's content and of the readers."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from nvfp4lab import atomic
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.fetch import cache_dir
from nvfp4lab.source.index import Index, no_garbage_collection
from nvfp4lab.source.package import Package

Reader = Callable[[Package, Index], list[Fact]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a reading took. files_read: unpacked and searched; files_parsed, lines_parsed: given to `ast`.

    unparsable: {member: reason}. bytes_unparsed: of what was searched alone, so that it is not known whether it parses.
    seconds: of the reading itself; from_cache: it was done before.
    """

    files_read: int
    files_parsed: int
    lines_parsed: int
    seconds: float
    unparsable: dict[str, str]
    bytes_unparsed: int = 0
    from_cache: bool = False

    def line(self, package: Package, facts: int) -> str:
        """One line for a person."""
        source = "from the cache" if self.from_cache else f"in {self.seconds:.2f} s"
        rest = f", {self.bytes_unparsed / 2**20:.0f} MiB searched and not parsed" if self.bytes_unparsed else ""
        return (
            f"{package.name} {package.version}: {facts} facts {source}; {self.files_read} files read, "
            f"{self.files_parsed} parsed, {self.lines_parsed} lines parsed, {len(self.unparsable)} not parsable{rest}"
        )


def facts_of(package: Package, read: Reader, parse_all: bool = False) -> tuple[list[Fact], Cost]:
    """Facts of a package and what they cost; from the cache when the same content was read by the same readers.

    parse_all: also parse what no reader asks for, and name every member that does not parse; never from the cache.
    """
    kept = cache_dir() / "facts" / f"{package.name}-{package.version}-{package.tree.digest()}-{readers_version()}.json"
    if not parse_all and (found := _load(kept)) is not None:
        return found
    started = time.perf_counter()
    with no_garbage_collection():
        index = Index(package)
        facts = distinct(read(package, index))
        index.parse_rest(*([math.inf] if parse_all else []))
    seconds = round(time.perf_counter() - started, 3)
    cost = Cost(index.files_read, index.files_parsed, index.lines_parsed, seconds, index.unparsable, index.bytes_unparsed)
    _store(kept, facts, cost)
    return facts, cost


def distinct(facts: list[Fact]) -> list[Fact]:
    """Each statement at each place once; several readers may come by the same line."""
    return list({json.dumps([fact.to_json() | {"also": None, "note": None}], sort_keys=True): fact for fact in facts}.values())


@functools.cache
def readers_version() -> str:
    """Hash of this package's own source: a changed reader never answers from an old cache."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def _load(kept: Path) -> tuple[list[Fact], Cost] | None:
    """What was kept, or None; a damaged file is read afresh."""
    try:
        row = json.loads(kept.read_text(encoding="utf-8"))
        return [Fact.from_json(fact) for fact in row["facts"]], Cost(**row["cost"] | {"from_cache": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(kept: Path, facts: list[Fact], cost: Cost) -> None:
    """Keep for next time; a cache that cannot be written costs time, not the answer."""
    row = {"cost": dataclasses.asdict(cost), "facts": [fact.to_json() for fact in facts]}
    with contextlib.suppress(OSError):
        atomic.replace(kept, json.dumps(row, ensure_ascii=False))
