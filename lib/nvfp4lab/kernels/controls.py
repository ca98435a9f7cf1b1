"""Emulations that are wrong by construction: that they fail shows that the gate is awake, and is no kernel's failure."""

import re

from nvfp4lab.records import Evidence

_ROUNDS_ITS_SUMS = re.compile(r"emulation\.\w*(float16|marlin)")  # bfloat16 too


def is_control(record: Evidence) -> bool:
    """Whether `record` is of an emulation that rounds its sums; the one that adds up in fp32 must be right like any kernel."""
    return record.stage == "kernel" and is_control_name(record.subject.partition(":")[2])


def is_control_name(backend: str) -> bool:
    """The same of a backend's name."""
    return bool(_ROUNDS_ITS_SUMS.match(backend))
