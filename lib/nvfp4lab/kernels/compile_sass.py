"""Reads what nvcc and ptxas made: kernels, registers, shared memory, spills, tensor-core instructions."""

import dataclasses
import re
import struct
from collections import Counter
from collections.abc import Iterable

_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_TENSOR = re.compile(r"^(UTC\w*MMA|\w*MMA)\b")
_CONVERSION = re.compile(r"^F2FP\..*E2M1|^F2FP\.E2M1")
_IDLE = frozenset({"NOP", "EXIT", "BRA", "RET", "LDC", "MOV", "IMAD.MOV.U32"})  # all that an empty kernel holds
_PTXAS_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_ELF_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One __global__ function as machine code. Sizes in bytes.

    name: mangled. tensor_instructions: static count by opcode, e.g. {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64}.
    fp4_conversions: F2FP instructions that pack or unpack e2m1. instructions: all but padding.
    is_empty: the body does nothing; a launch would succeed and leave its output untouched.
    """

    name: str
    registers: int
    static_shared_bytes: int
    spill_bytes: int
    instructions: int
    tensor_instructions: tuple[tuple[str, int], ...]
    fp4_conversions: int
    is_empty: bool

    @property
    def short_name(self) -> str:
        """Qualified name without template arguments."""
        return qualified_name(self.name)


def read(ptxas_log: str, sass: str) -> list[Kernel]:
    """Kernels of one cubin, from the log of `ptxas -v` and the text of `cuobjdump -sass`."""
    bodies = dict(_sections(_FUNCTION, sass))
    return [_kernel(name, log, bodies.get(name, "")) for name, log in _sections(_PTXAS_ENTRY, ptxas_log)]


def _sections(header: re.Pattern, text: str) -> Iterable[tuple[str, str]]:
    found = list(header.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return ((match[1], text[match.end() : end]) for match, end in zip(found, ends, strict=True))


def _kernel(name: str, log: str, body: str) -> Kernel:
    opcodes = Counter(match[1] for match in _OPCODE.finditer(body))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers, shared = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes smem", log)
    return Kernel(
        name,
        registers=int(registers[1]) if registers else 0,
        static_shared_bytes=int(shared[1]) if shared else 0,
        spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
        instructions=opcodes.total() - opcodes["NOP"],
        tensor_instructions=tuple(sorted((opcode, count) for opcode, count in opcodes.items() if _TENSOR.match(opcode))),
        fp4_conversions=sum(count for opcode, count in opcodes.items() if _CONVERSION.match(opcode)),
        is_empty=set(opcodes) <= _IDLE,
    )


def tensor_histogram(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Tensor-core instructions of all kernels together."""
    total: Counter[str] = Counter()
    for kernel in kernels:
        total.update(dict(kernel.tensor_instructions))
    return dict(total.most_common())


def tensor_path(histogram: Iterable[str]) -> str:
    """What arithmetic the tensor cores do: "block-scaled FP4", "FP8", "bf16/fp16" or "none".

    Opcodes as observed with CUDA 13.0: OMMA (SM120 warp-level FP4), UTCOMMA (SM100 tensor-memory FP4), QMMA, UTCQMMA,
    QGMMA (8 bit), HMMA, UTCHMMA, HGMMA (16 bit).
    """
    families = {opcode.split(".")[0] for opcode in histogram}
    for path, members in (
        ("block-scaled FP4", {"OMMA", "UTCOMMA"}),
        ("FP8", {"QMMA", "UTCQMMA", "QGMMA"}),
        ("bf16/fp16", {"HMMA", "UTCHMMA", "HGMMA"}),
    ):
        if families & members:
            return path
    return "none" if not families else "other: " + ", ".join(sorted(families))


def symbol_sizes(cubin: bytes, prefix: str) -> dict[str, int]:
    """Sizes in bytes of the symbols whose name starts with `prefix`, name without it. `cubin`: a 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table_offset, entry_size, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 58)
    sections = [_ELF_SECTION.unpack_from(cubin, table_offset + index * entry_size) for index in range(count)]
    sizes = {}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for at in range(offset, offset + size, _ELF_SYMBOL.size):
            name_offset, _, _, _, _, symbol_size = _ELF_SYMBOL.unpack_from(cubin, at)
            start = strings + name_offset
            name = cubin[start : cubin.index(b"\0", start)].decode(errors="replace")
            if name.startswith(prefix):
                sizes[name.removeprefix(prefix)] = symbol_size
    return sizes


def qualified_name(mangled: str) -> str:
    """The nested name of an Itanium-mangled function without its template arguments; other names are returned as they are."""
    rest = re.sub(r"^_ZN?", "", mangled)
    parts = []
    while (length := re.match(r"\d+", rest)) and mangled.startswith("_Z"):
        start = length.end()
        parts.append(rest[start : start + int(length[0])])
        rest = rest[start + int(length[0]) :]
    return "::".join(parts) or mangled
