"""Secrets leave no trace: every string passes through here before it reaches a ledger, a notebook, a log or a page.

Three nets, each caught by tests with planted secrets: values that follow a secret-like name, values of well-known
shapes, and the values of this process's own secret-like environment variables wherever they appear.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "[redacted]"
MIN_VALUE_LENGTH = 6  # shorter environment values would blot out ordinary words

# A name whose last word says "secret"; `bos_token` and the like are vocabulary entries, `max_tokens` is a count.
_SECRET_NAME = (
    r"(?<![A-Za-z0-9_-])(?!(?:old)?pwd\s*[=:]\s*/)(?!(?:[A-Za-z0-9]+[_-])*(?:bos|eos|pad|unk|sep|cls|mask|next|first|last|image|stop|special|per)[_-]token\b)"
    r"(?:[A-Za-z0-9]+[_-])*?(?:token|secret|passw(?:or)?d|passphrase|pwd|api[_-]?key|apikey|access[_-]?key(?:[_-]?id)?|private[_-]?key"
    r"|secret[_-]?key|auth[_-]?key|license[_-]?key|signing[_-]?key|encryption[_-]?key|credentials?|bearer|pat)(?![A-Za-z0-9_-])"
)
_QUOTE = r"\\*[\"']"
_NAMED_VALUE = re.compile(
    rf"(?i)(?P<name>{_SECRET_NAME}(?:{_QUOTE})?\s*(?:=|:)\s*)"
    rf"(?P<value>(?P<quote>{_QUOTE})(?!\s)(?:(?!(?P=quote)).)+(?P=quote)|(?!\d+(?:\.\d+)?\b)(?!None\b|null\b|true\b|false\b)[^\s\"'\\,;&<>()\[\]{{}}]{{4,}})"
)
_FLAG_VALUE = re.compile(
    r"(?i)(?P<name>--[a-z0-9-]*(?:token|secret|password|passwd|api-key|access-key|credential)(?:=|\s+))(?P<value>[^\s\"']+)"
)
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>\b(?:proxy-)?authorization\b(?:\\*[\"'])?\s*[:=]\s*(?:\\*[\"'])?(?:(?:bearer|basic|token|digest)\s+)?)(?P<value>[^\s\"',\\]+)"
)
_BEARER = re.compile(r"(?i)(?P<name>\bbearer\s+)(?P<value>[A-Za-z0-9._~+/=-]{8,})")
_URL_CREDENTIALS = re.compile(r"(?P<name>\b[a-z][a-z0-9+.-]*://)(?P<value>[^\s/@\"'<>]+:[^\s/@\"'<>]+|[^\s/@:\"'<>]{12,})(?=@)")
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bAIza[0-9A-Za-z_-]{30,}|\bnvapi-[A-Za-z0-9_-]{16,}|\bpypi-[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_ENVIRONMENT_NAME = re.compile(rf"(?i)^{_SECRET_NAME}$|(?i:_key$)")
_WORKING_DIRECTORY = frozenset({"PWD", "OLDPWD"})
_BINARY_OUTPUTS = frozenset({"image/png", "image/jpeg"})
_TEXT_SUFFIXES = frozenset(
    {".txt", ".log", ".json", ".jsonl", ".ipynb", ".html", ".md", ".csv", ".yaml", ".yml", ".out", ".err", ""}
)


def redact(text: str) -> str:
    """`text` with every secret-like value replaced by `[redacted]`; names and the rest stay readable."""
    for value in _environment_secrets():
        text = text.replace(value, MARK)
    for pattern in (_AUTHORIZATION, _BEARER, _URL_CREDENTIALS, _FLAG_VALUE, _NAMED_VALUE):
        text = pattern.sub(_keep_name, text)
    return _SHAPES.sub(MARK, text)


def redact_data(value: Any) -> Any:
    """Plain data with every string redacted, and every string under a secret-like key replaced whole."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: item if key in _BINARY_OUTPUTS else _redact_item(key, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_data(item) for item in value]
    return value


def redact_files(folder: Path, max_bytes: int = 64 * 2**20) -> list[Path]:
    """Rewrite every text file under `folder` that holds a secret; returns the files changed.

    For what other programs wrote: server logs, core notes, benchmark output. Larger files than `max_bytes` are
    handled line by line, so a secret that spans lines (a private key) is caught in smaller files only.
    """
    changed = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix in _TEXT_SUFFIXES and _redact_file(path, max_bytes):
            changed.append(path)
    return changed


def _redact_file(path: Path, max_bytes: int) -> bool:
    text = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    whole = path.stat().st_size <= max_bytes
    with path.open(**text) as source:
        if all(_redact_text(part, path.suffix) == part for part in ([source.read()] if whole else source)):
            return False
    beside = path.with_name(f".{path.name}.redacting")
    with path.open(**text) as source, beside.open("w", **text) as target:
        target.writelines(_redact_text(part, path.suffix) for part in ([source.read()] if whole else source))
    beside.replace(path)
    return True


def _redact_text(text: str, suffix: str) -> str:
    """JSON is redacted as data, so that it stays JSON; anything else as text."""
    if suffix not in {".json", ".jsonl", ".ipynb"}:
        return redact(text)
    try:
        rows = [json.loads(text)]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            return redact(text)
    clean = [redact_data(row) for row in rows]
    return text if clean == rows else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in clean)


def _redact_item(key: Any, item: Any) -> Any:
    secret = isinstance(item, str) and item and isinstance(key, str) and _names_a_secret(key)
    return MARK if secret else redact_data(item)


def _keep_name(match: re.Match) -> str:
    quote = match.groupdict().get("quote") or ""
    return match["name"] + quote + MARK + quote


def _environment_secrets() -> tuple[str, ...]:
    """Values of this process's secret-like environment variables, longest first."""
    return _long_enough(tuple(os.environ.get(name, "") for name in os.environ if _names_a_secret(name)))


@functools.lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    return name not in _WORKING_DIRECTORY and _ENVIRONMENT_NAME.search(name) is not None


@functools.lru_cache(maxsize=8)
def _long_enough(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({value for value in values if len(value) >= MIN_VALUE_LENGTH}, key=len, reverse=True))
