"""Three engines behind one small interface: `local` (processes), `ray` (a Ray cluster), `slurm` (submitit).

The lab has no scheduler, lease or queue of its own: an engine schedules, repeats and isolates; `piece.execute` makes a
repeat harmless.
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.errors import LabError

NAMES = ("local", "ray", "slurm")


class Executor(Protocol):
    """Executes pieces on the hosts it knows."""

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """Yield one Result for each piece, as they finish, in any order.

        A piece that no attempt finished has verdict NOT_RUN, CRASH (its process died each time) or HANG (timeout).
        Closing the iterator stops what is still running.
        """
        ...


def create(name: str, **options) -> Executor:
    """The engine `name`. Raises LabError when its optional package is not installed."""
    if name not in NAMES:
        raise LabError(f"no executor {name!r}; there are {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"nvfp4lab.batch.executors.{name}_engine")
    except ImportError as error:
        raise LabError(f"executor {name!r} needs `pip install 'nvfp4lab[{name}]'` ({error})", exit_code=3) from error
    return module.create(**options)
