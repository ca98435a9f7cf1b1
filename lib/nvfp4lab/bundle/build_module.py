"""Child process: compile one JIT module of SGLang or FlashInfer for a GPU that is not here.

Run by `kernels.build`, one process a module. Argument: a JSON object {package, functions, arguments, capability}. The last
line of stdout is a JSON object: {"library": path}, or {"absent": why} when this version of the package has no such module.
Any other failure is an exception, and the exit code says so. It imports nothing of the lab: the packages under PYTHONPATH
are the bundle's, not this interpreter's.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path


def find(places: list[str]):
    """The first function of `places` ("module:function") that exists.

    Raises LookupError when none does; an import that fails for another reason is raised as it is.
    """
    for place in places:
        module_name, _, function_name = place.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and module_name.startswith(error.name):
                continue  # this version keeps it elsewhere
            raise
        if hasattr(module, function_name):
            return getattr(module, function_name)
    raise LookupError(f"none of {', '.join(places)}")


def fake_capability(major: int, minor: int) -> None:
    """Make torch report one GPU of this capability. Called after the imports, which would use a GPU that they believe in."""
    import torch

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def build_sglang(job: dict) -> Path:
    """SGLang's own loader compiles and loads; the library lies where a server on that GPU will look, below TVM_FFI_CACHE_DIR."""
    import torch

    function = find(job["functions"])
    fake_capability(*job["capability"])
    cache = Path(os.environ["TVM_FFI_CACHE_DIR"])
    before = set(cache.glob("*/*.so"))
    try:
        function(*[_argument(torch, item) for item in job["arguments"]])
    except (OSError, RuntimeError):
        # The loader also loads what it built, and a module that calls the driver cannot be loaded without one.
        if not set(cache.glob("*/*.so")) - before:
            raise
    new = set(cache.glob("*/*.so")) - before
    if len(new) != 1:
        raise RuntimeError(f"{function.__name__} left {len(new)} new libraries in {cache}, expected one")
    return new.pop()


def _argument(torch, item):
    return getattr(torch, item) if isinstance(item, str) and isinstance(getattr(torch, item, None), torch.dtype) else item


def build_flashinfer(job: dict) -> Path:
    """FlashInfer's generator and ninja. Its package import wants a driver and CUDA bindings, so only the `jit` part is imported."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("flashinfer is not installed")
    package = types.ModuleType("flashinfer")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["flashinfer"] = package
    module = find(job["functions"])(*job["arguments"])
    module.build(verbose=False)
    return Path(module.jit_library_path)


def end_with_parent() -> None:
    """End this process group once the lab is gone, however it went: a compiler left behind would burn a core for minutes."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    end_with_parent()
    job = json.loads(sys.argv[1])
    build = {"sglang": build_sglang, "flashinfer": build_flashinfer}[job["package"]]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = {"library": str(build(job))}
    except LookupError as error:
        answer = {"absent": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
