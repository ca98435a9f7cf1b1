"""C++ and CUDA text that a wheel ships: thread configurations of the Marlin kernels. Read by pattern, not by AST."""

import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.sglang.reading import Reading

_TABLE = re.compile(r"(small|large)_batch_thread_configs\[\]\s*=\s*\{(.*?)\};", re.S)
_ROW = re.compile(r"\{\s*(\d+),\s*(\d+),\s*(\d+)\s*\}")


def read(reading: Reading) -> Iterator[Fact]:
    """`thread_configs_kn`: the (thread_k, thread_n) pairs that K and N must be divisible by, for small batches."""
    tree = reading.index.package.tree
    for member in tree.names():
        if not member.endswith((".cuh", ".cu", ".h")) or "marlin" not in member:
            continue
        text = tree.read(member).decode("utf-8", errors="replace")
        kernel = member.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        for table in _TABLE.finditer(text):
            pairs = [[int(row[1]), int(row[2])] for row in _ROW.finditer(table[2])]
            line = text.count("\n", 0, table.start()) + 1
            subject = f"kernel:{kernel}" if table[1] == "small" else f"kernel:{kernel}:large_batch"
            yield Fact(
                "sglang",
                reading.version,
                subject,
                "thread_configs_kn",
                pairs,
                member,
                line,
                evidence=text.splitlines()[line - 1].strip(),
                note="not AST: matched by pattern in CUDA text; K % thread_k and N % thread_n must be 0",
            )
