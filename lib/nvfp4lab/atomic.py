"""Files that are whole or not there: a reader sees the old content or the new, never half of one."""

import os
from pathlib import Path


def replace(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path` by one rename; folders above are made. Raises OSError (no space, no rights)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)
