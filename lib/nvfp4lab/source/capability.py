"""Compute capabilities: which ones a condition admits, and how the facts' `when` says it."""

from collections.abc import Iterable

Capability = tuple[int, int]
PATTERN = r"\d{1,2}\.\d"  # of one as text

# The capabilities that NVFP4 users have or ask about; conditions are decided by trying each.
KNOWN: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
MAJORS = (8, 9, 10, 11, 12)


def parse(text: str) -> Capability:
    """(12, 0) of "12.0"; ValueError on anything else."""
    major, minor = text.split(".")
    return int(major), int(minor)


def when(admitted: Iterable[Capability], tried: Iterable[Capability] = KNOWN) -> list[dict[str, object]]:
    """Every customary way to state which of the capabilities `tried` are admitted, the plainest first.

    One major: `cc_major: 12`. Ampere to Hopper: `cc: ">=80,<100"`. All but some: `cc_major_not`/`cc_major_not_in`.
    An empty list means that the condition does not restrict the capability; sets that split a major give its `cc`.
    """
    chosen = frozenset(admitted)
    majors = sorted({major for major, _ in chosen if major in MAJORS})
    if any((cc in chosen) != (cc[0] in majors) for cc in tried if cc[0] in MAJORS):
        return [{"cc": sorted(10 * major + minor for major, minor in chosen)}]
    missing = [major for major in MAJORS if major not in majors]
    if not majors or not missing:
        return []
    if majors == [8, 9]:
        return [{"cc": ">=80,<100"}, {"cc": "<100"}]
    if len(majors) == 1 or majors[0] >= 10:
        return [_majors(majors)]
    # the set reaches below Blackwell, so it is said by what it leaves out; its Blackwell part is said besides
    complement = {"cc_major_not": missing[0]} if len(missing) == 1 else {"cc_major_not_in": missing}
    blackwell = [major for major in majors if major >= 10]
    return [complement, *([_majors(blackwell)] if blackwell else [])]


def _majors(majors: list[int]) -> dict[str, object]:
    return {"cc_major": majors[0] if len(majors) == 1 else majors}
