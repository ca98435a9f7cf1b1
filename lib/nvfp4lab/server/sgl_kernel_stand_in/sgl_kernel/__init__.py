"""Stands in for SGLang's compiled `sgl_kernel` on a host without CUDA, so that SGLang's Python can be imported.

The real wheel links libcuda.so.1 and cannot be loaded there. SGLang imports names from it at module level that a CPU
server (`--device cpu`, torch_native attention) never calls. So every name exists here, and raises when it is called: a
path that does need a kernel fails loudly, with the kernel's name, and computes nothing.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stand.in"


class _Absent:
    """A kernel, or a namespace of constants such as `scalar_types.uint4b8`: can be named, cannot be called."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{self.__name__} was called, but this host has no CUDA and runs NVFP4 Lab's stand-in for sgl_kernel; "
            "serve a bf16 model with --device cpu, or use a GPU host"
        )


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any `sgl_kernel.x` importable; which submodules SGLang imports differs by version."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(_Submodules())


def __getattr__(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"sgl_kernel.{name}")
