"""Emulations that are wrong by construction: that they fail shows that the gate is awake, and is no kernel's failure."""

from nvfp4lab.records import Evidence

_NARROW_SUMS = ("bfloat16", "float16", "marlin")


def is_control(record: Evidence) -> bool:
    """Whether `record` is of an emulation that rounds its sums; the one that adds up in fp32 must be right like any kernel."""
    backend = record.subject.split(":")[1:2]
    return record.stage == "kernel" and any(name.startswith("emulation.") and _rounds(name) for name in backend)


def _rounds(name: str) -> bool:
    return any(word in name for word in _NARROW_SUMS)
