"""Which FlashInfer and kernel package this SGLang asks for: the requirement lines of its metadata."""

import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.sglang.requirements import PIN

_FLASHINFER = re.compile(PIN.format(name=r"flashinfer[_-]python"), re.I)
_KERNEL = re.compile(PIN.format(name=r"(?:sgl|sglang)[_-]kernel"), re.I)


def read(reading: Reading) -> Iterator[Fact]:
    """`package requires_flashinfer` (version) and `requires_sgl_kernel` (name==version)."""
    member = reading.index.package.metadata_member()
    if member is None:
        yield reading.not_found("package", "requires_flashinfer", "METADATA or pyproject.toml", reading.index.package.origin)
        return
    lines = reading.index.package.tree.read(member).decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if "extra ==" in line:
            continue
        if found := _FLASHINFER.match(line):
            yield Fact("sglang", reading.version, "package", "requires_flashinfer", found[2], member, number, evidence=line.strip())
        elif found := _KERNEL.match(line):
            pin = f"{found[1].replace('_', '-').lower()}=={found[2]}"
            yield Fact("sglang", reading.version, "package", "requires_sgl_kernel", pin, member, number, evidence=line.strip())
