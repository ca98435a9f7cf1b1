"""What an expression of the target can be known to be, without running it."""

import dataclasses
from typing import Any

from nvfp4lab.source.capability import Capability
from nvfp4lab.source.module import Definition


class Unknown:
    """The one value that source alone does not decide. It is never equal to anything, and has no truth value."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise TypeError("an unknown value has no truth; ask `truth` instead")


UNKNOWN = Unknown()


@dataclasses.dataclass(frozen=True)
class EnumValue:
    """Member of one of the backend enums. enum: class name. value: the string that the flag takes."""

    enum: str
    value: str


@dataclasses.dataclass(frozen=True)
class Reference:
    """A module, class or function by its dotted name; it exists, so it is never None."""

    dotted: str


@dataclasses.dataclass(frozen=True)
class Instance:
    """An object of which only the class name is known, made by the call on `line`."""

    type_name: str
    line: int = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """The model layer whose weights were prepared: the names of the attributes that preparation writes."""

    written: frozenset[str]


@dataclasses.dataclass(eq=False)
class Self:
    """The object whose method is read: its class and the attributes that its earlier methods are known to have set."""

    owner: Definition
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is fixed for one reading; None or absent means unknown, and both branches are kept.

    cc: compute capability. flags: resolved ServerArgs fields by name ("moe_runner_backend", "quantization", ...), under
    whatever object the target reads them from. `platform`: an NVIDIA GPU is assumed, as everywhere in the lab.
    """

    cc: Capability | None = None
    flags: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, cc: Capability | None = None, **flags: Any) -> "Scenario":
        return cls(cc, tuple(sorted(flags.items())))

    def flag(self, name: str) -> Any:
        """Value of a ServerArgs field, or UNKNOWN."""
        return next((value for key, value in self.flags if key == name), UNKNOWN)

    def sets(self, name: str) -> bool:
        return any(key == name for key, _ in self.flags)


def truth(value: Any) -> bool | None:
    """True or False where it is decided, None where not."""
    if isinstance(value, Unknown):
        return None
    if isinstance(value, EnumValue | Reference | Instance | Layer | Self):
        return True
    if isinstance(value, tuple) and any(isinstance(item, Unknown) for item in value):
        return True  # a tuple with members is true whatever they are
    return bool(value)


def shown(value: Any) -> str | None:
    """A value as a message prints it; None where it is not known in whole."""
    if isinstance(value, EnumValue):
        return value.value
    if isinstance(value, tuple):
        items = [shown(item) for item in value]
        return None if None in items else ", ".join(map(str, items))
    return str(value) if value is None or isinstance(value, str | int | float) else None
