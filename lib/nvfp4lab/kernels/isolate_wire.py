"""Frames between the lab and an isolated worker: only a whole frame with the case's own token counts as said by the harness.

A worker is not trusted: the kernel under test may write anything to any file descriptor before it dies. A frame
therefore carries a random token of the case, its length and a CRC; everything else on the pipe is counted as noise.
"""

import pickle
import struct
import zlib
from typing import Any

TOKEN_BYTES = 16
_HEAD = struct.Struct("!QI")  # length of the body in bytes, CRC-32 of the body
_BODY_LIMIT_BYTES = 1 << 30


def pack(token: bytes, kind: str, payload: Any) -> bytes:
    """One frame. `kind` is what the harness says ("phase", "returned", "raised"); payload is anything picklable."""
    body = pickle.dumps((kind, payload), protocol=pickle.HIGHEST_PROTOCOL)
    return token + _HEAD.pack(len(body), zlib.crc32(body)) + body


class Frames:
    """Collects bytes and yields the whole frames among them."""

    def __init__(self, token: bytes):
        self.token = token
        self.noise_bytes = 0
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[str, Any]]:
        """Frames completed by `data`, in order. A body that does not unpickle is kind "damaged" with the reason."""
        self._pending += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> tuple[str, Any] | None:
        start = self._pending.find(self.token)
        if start < 0:
            kept = min(len(self._pending), TOKEN_BYTES - 1)  # the token may be cut in two by a read
            self._drop(len(self._pending) - kept)
            return None
        self._drop(start)
        head_end = TOKEN_BYTES + _HEAD.size
        if len(self._pending) < head_end:
            return None
        length, crc = _HEAD.unpack(self._pending[TOKEN_BYTES:head_end])
        if length > _BODY_LIMIT_BYTES:
            self._drop(TOKEN_BYTES)
            return "damaged", f"a frame claims {length} bytes"
        if len(self._pending) < head_end + length:
            return None
        body = bytes(self._pending[head_end : head_end + length])
        del self._pending[: head_end + length]
        return _unpack(body, crc)

    def _drop(self, count: int) -> None:
        self.noise_bytes += count
        del self._pending[:count]


def _unpack(body: bytes, crc: int) -> tuple[str, Any]:
    if zlib.crc32(body) != crc:
        return "damaged", "checksum of the result does not match"
    try:
        return pickle.loads(body)
    except Exception as error:  # unpickling runs the payload's own code: anything may come
        return "damaged", f"the result does not unpickle here: {type(error).__name__}: {error}"
