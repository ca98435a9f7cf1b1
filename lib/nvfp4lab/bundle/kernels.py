"""Kernel modules compiled without the GPU, each once and in its own process, into the caches where servers look.

SGLang loads `$TVM_FFI_CACHE_DIR/<module>__arch_<arch>__tvmffi_<version>/<module>.so` without running ninja; FlashInfer loads
`flashinfer/data/aot/<name>/<name>.so` of its own package before it thinks of compiling. A module compiled here by the same packages
is therefore found by name. A build that is stopped loses its module only; the next call goes on with the rest.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from nvfp4lab.bundle.recipe import Module, Recipe, Request
from nvfp4lab.bundle.toolkit import Toolkit
from nvfp4lab.bundle.wheels import run_pip
from nvfp4lab.errors import LabError


@dataclasses.dataclass(frozen=True)
class Built:
    """One module's outcome.

    library: relative to the bundle; None when this SGLang or FlashInfer has no such module, and `absent` says why.
    """

    name: str
    library: str | None
    sha256: str | None
    seconds: float
    fingerprint: str
    absent: str | None = None


def install_overlay(request: Request, versions: Iterable[str]) -> Path:
    """The same SGLang, FlashInfer and tvm-ffi for this interpreter, which runs their loaders; `versions` are "name==version"."""
    overlay = request.scratch / "overlay"
    stamp = overlay / "versions.txt"
    wanted = "\n".join(versions)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(overlay, ignore_errors=True)
        run_pip("install", "-q", "--no-compile", "--no-warn-conflicts", "--no-deps", "--target", overlay, *wanted.split("\n"))
        stamp.write_text(wanted)
    return overlay


def build_all(request: Request, recipe: Recipe, overlay: Path, say: Callable[[str], None]) -> list[Built]:
    """Every module of the recipe, `request.jobs` at a time; finished ones are taken over.

    Raises LabError after the first that fails, when those under way have ended; Ctrl-C ends them at once.
    """
    toolkit = Toolkit.find(request.scratch)
    say(f"kernels: nvcc {toolkit.release} for {request.arch}, {len(recipe.modules)} modules, {request.jobs} at a time")
    running: set[subprocess.Popen] = set()
    with concurrent.futures.ThreadPoolExecutor(request.jobs) as pool:
        waiting = [pool.submit(build, request, module, overlay, toolkit, say, running) for module in recipe.modules]
        try:
            return [future.result() for future in waiting]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, Exception):
                for child in list(running):
                    os.killpg(child.pid, signal.SIGTERM)  # nvcc and its cicc are in the child's group
            raise


def build(
    request: Request,
    module: Module,
    overlay: Path,
    toolkit: Toolkit,
    say: Callable[[str], None],
    running: set[subprocess.Popen] | None = None,
) -> Built:
    """Compile one module, or take over what an earlier call compiled. running: where its process is listed meanwhile."""
    job = {
        "package": module.package,
        "functions": [place.format(family=request.family) for place in module.functions],
        "arguments": module.arguments,
        "capability": request.capability,
    }
    # The overlay's versions, the compiler and the job decide the machine code; anything else may differ between calls.
    seed = json.dumps([job, request.arch, toolkit.release, (overlay / "versions.txt").read_text()])
    fingerprint = hashlib.sha256(seed.encode()).hexdigest()[:16]
    state = request.scratch / "modules" / f"{module.package}-{module.name}.json"
    earlier = _finished(request, state, fingerprint)
    if earlier:
        say(f"  {module.name}: built before")
        return earlier
    say(f"  {module.name}: compiling, about {module.minutes:g} min on one core")
    started = time.monotonic()
    answer = _run_child(request, module, job, overlay, toolkit, set() if running is None else running)
    seconds = round(time.monotonic() - started, 1)
    library = _place(request, module, Path(answer["library"])) if "library" in answer else None
    built = Built(
        module.name, library, _sha256(request.bundle / library) if library else None, seconds, fingerprint, answer.get("absent")
    )
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps(dataclasses.asdict(built)))
    say(f"  {module.name}: " + (f"{seconds:.0f} s" if library else f"not in this version ({built.absent})"))
    return built


def _finished(request: Request, state: Path, fingerprint: str) -> Built | None:
    if not state.exists():
        return None
    built = Built(**json.loads(state.read_text()))
    if built.fingerprint != fingerprint:
        return None
    if built.library is None:
        return built
    library = request.bundle / built.library
    if not library.exists():  # the site folder was made anew since: FlashInfer's modules lie inside it
        kept = request.scratch / "libraries" / built.library
        if not kept.exists():
            return None
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kept, library)
    return built if _sha256(library) == built.sha256 else None


def _run_child(request: Request, module: Module, job: dict, overlay: Path, toolkit: Toolkit, running: set) -> dict:
    scratch = request.scratch / "compile" / f"{module.package}-{module.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = (
        os.environ
        | toolkit.environment()
        | {
            "PYTHONPATH": str(overlay),
            "CUDA_VISIBLE_DEVICES": "",
            "TVM_FFI_CACHE_DIR": str(scratch),
            "FLASHINFER_WORKSPACE_BASE": str(scratch),
            "FLASHINFER_CUDA_ARCH_LIST": request.arch,
            "MAX_JOBS": "1",
        }
    )
    command = [sys.executable, str(Path(__file__).with_name("build_module.py")), json.dumps(job)]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    running.add(child)
    try:
        output, errors = child.communicate()
    finally:
        running.discard(child)
    (scratch / "log.txt").write_text(output + errors)
    if child.returncode:
        raise LabError(
            f"{module.name}: {_explain(output + errors, child.returncode)}; whole log: {scratch / 'log.txt'}", exit_code=1
        )
    return json.loads(output.strip().splitlines()[-1])


def _explain(log: str, code: int) -> str:
    """The decisive line of a failed build, with advice where it is known."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if code < 0:
        return (
            f"killed by signal {-code}; one cicc needs up to 6 GiB, so try --jobs 1" if code == -9 else f"killed by signal {-code}"
        )
    if any("No space left on device" in line for line in lines):
        return "disk full while compiling; free space and run the same command again, finished modules are kept"
    missing = next((line for line in reversed(lines) if line.startswith("ModuleNotFoundError")), None)
    if missing:
        return f"{missing}; SGLang's loader needs it in the lab's environment (extra `serve-cpu` has the usual ones)"
    return next(
        (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else f"exit code {code} without a word"
    )


def _place(request: Request, module: Module, library: Path) -> str:
    """Copy `library` to where a server looks; returns its path relative to the bundle. Renamed into place, so never half there."""
    if module.package == "sglang":
        relative = Path("cache/tvm-ffi") / library.parent.name / library.name
    else:
        relative = Path("site/flashinfer/data/aot") / library.stem / library.name
    for root in (request.scratch / "libraries", request.bundle):
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copy2(library, partial)
        partial.replace(target)
    return str(relative)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
