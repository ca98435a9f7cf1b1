"""Kernels by name: one small file for each family, all with the shape of `base.Backend`.

To add one: write a file with a `BACKENDS` tuple and name it in `_FAMILIES`.
"""

import difflib
import functools
import importlib

from nvfp4lab.errors import LabError
from nvfp4lab.kernels.backends.base import Backend

_FAMILIES = (
    "torch_cpu",
    "flashinfer_quantise",
    "flashinfer_mm_fp4",
    "flashinfer_moe_cutlass",
    "flashinfer_moe_trtllm",
    "flashinfer_moe_cute_dsl",
    "sglang_marlin",
    "sglang_cutlass",
)


@functools.lru_cache(maxsize=1)
def every() -> dict[str, Backend]:
    """All backends that the lab knows, by name, whether or not they can run here."""
    families = [importlib.import_module(f"{__name__}.{family}").BACKENDS for family in _FAMILIES]
    return {backend.name: backend for family in families for backend in family}


def find(name: str) -> Backend:
    """The backend of that name. Raises LabError with the nearest name."""
    known = every()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
    raise LabError(f"no kernel backend {name!r}{hint}")
