"""Lines of a server log as text that patterns can search: any size, any bytes, colour codes and logger prefixes off."""

import dataclasses
import re
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 1 << 13  # a longer line (one JSON of a request, binary junk) is searched in pieces of this size
OVERLAP_BYTES = 1 << 10  # so that a signature on the seam stands whole in one of them

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_LONG_WORD = re.compile(rb"\S{256,}")  # base64, hashes, token lists: patterns would crawl over them
_CONTROL_BYTES = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# What loggers, containers and launchers put before a message. Each is taken off once, in whatever order they stand.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d) (stdout|stderr) [FP] ",  # Kubernetes
        r"[\w.-]+\s{1,30}\| ",  # docker compose
        r"\((\w+ )*pid=\d+[^)]*\) ?",  # Ray, vLLM workers
        r"\(\w+ ?\w*\) (?=[A-Z]+ \d\d-\d\d)",
        r"\[(rank|default)\d+\]:\[?(?=[\w\[ ])|\[\d+,\d+\]<std(err|out)>: ?",  # torchrun, mpirun
        r"\[\d{4}-\d\d-\d\d[ T][\d:.,]+(Z)?( [A-Z]+\d+)*\] ?",  # SGLang: [2026-01-02 03:04:05 DP0 TP1]
        r"\d{4}-\d\d-\d\d[ T][\d:.,]+Z?( -)? ",
        r"[IWEF]\d{4} [\d:.]+ +\d+ [^\]]{0,120}\] ",  # glog, as torch's C++ writes
        _LEVEL + r"[: ]\s*(\d\d-\d\d [\d:.]+ )?(\[[\w./-]+:\d+\] ?)?(?=\S| {4})",
        r"\[[\w./-]+\.(py|cpp|cc|cu):\d+\]\s?",
    )
)
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line, or one piece of a very long one.

    number: from 1. raw: the bytes. The rest is derived when asked for, since most lines are never looked at.
    """

    number: int
    raw: bytes

    def clean(self) -> str:
        """The line as a person would read it: no colour codes, no control characters; bytes that are not UTF-8 as \\xNN."""
        text = self.raw.decode("utf-8", errors="backslashreplace")
        text = text.rstrip("\r\n").rsplit("\r", 1)[-1]  # a progress bar overwrites itself
        return _CONTROLS.sub("", _ESCAPES.sub("", text))


def read(stream: BinaryIO) -> Iterator[Line]:
    """Every line of `stream` in order, at constant memory."""
    number, rest = 1, b""
    while block := stream.read(BLOCK_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for raw in whole:
            yield from _pieces(number, raw)
            number += 1
        if len(rest) > BLOCK_BYTES:
            yield from _pieces(number, rest)
            rest = rest[-OVERLAP_BYTES:]
    if rest:
        yield from _pieces(number, rest)


def _pieces(number: int, raw: bytes) -> Iterator[Line]:
    if len(raw) <= PIECE_BYTES:
        yield Line(number, raw)
        return
    for start in range(0, len(raw), PIECE_BYTES - OVERLAP_BYTES):
        piece = _LONG_WORD.sub(_shorten, raw[start : start + PIECE_BYTES])
        if len(piece) - len(piece.translate(None, _CONTROL_BYTES)) <= len(piece) // 20:  # else binary, and no log says that much
            yield Line(number, piece)


def _shorten(word: re.Match[bytes]) -> bytes:
    return word[0][:100] + b"..." + word[0][-100:]


@dataclasses.dataclass(frozen=True)
class Message:
    """A line without its logger's prefix. level: as the logger wrote it, None where it wrote none (SGLang's default format)."""

    text: str
    level: str | None

    @property
    def indented(self) -> bool:
        return self.text[:1] in (" ", "\t")


def message(clean: str) -> Message:
    """Take prefixes off; an indentation after them stays, since it tells a traceback's frames from its exception."""
    level = None
    text = clean
    for _ in range(4):
        for pattern in _PREFIXES:
            found = pattern.match(text)
            if found and found.end():
                level = found.groupdict().get("level") or (_GLOG_LEVELS.get(text[0]) if text[1:5].isdigit() else None) or level
                text = text[found.end() :]
                break
        else:
            break
    return Message(text, "WARNING" if level == "WARN" else level)
