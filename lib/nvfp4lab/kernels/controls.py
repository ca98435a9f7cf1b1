"""Emulations that are wrong by construction: that they fail shows that the gate is awake, and is no kernel's failure."""

import re

from nvfp4lab.records import Evidence

_ROUNDS_ITS_SUMS = re.compile(r"\w+:emulation\.\w*(float16|marlin)")  # bfloat16 too


def is_control(record: Evidence) -> bool:
    """Whether `record` is of an emulation that rounds its sums; the one that adds up in fp32 must be right like any kernel."""
    return record.stage == "kernel" and bool(_ROUNDS_ITS_SUMS.match(record.subject))
