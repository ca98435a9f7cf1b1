"""The whole bundle, step by step; every finished step is kept, so a stopped call goes on where it was."""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from nvfp4lab.bundle import kernels, pack, recipe, toolkit, wheels
from nvfp4lab.bundle.recipe import Recipe, Request
from nvfp4lab.errors import LabError

NEEDED_BYTES = 6 << 30  # SGLang's kernel wheel alone unpacks to 1.2 GB before it is trimmed


def make(request: Request, with_kernels: bool = True, say: Callable[[str], None] = print) -> Path:
    """Make `DIR/bundle` (and `DIR/parts` with split_mib); returns the bundle folder. Raises LabError with what to do."""
    _check_space(request.directory)
    plan = recipe.load()
    wheels.globs(request, plan)  # an unknown --keep is an error now, not after ten minutes
    _check_fixtures(request)  # nor an unknown --fixture
    if with_kernels:
        toolkit.check_target(request.arch)  # nor a compiler that is not here, or that does not know the GPU
    _install_once(request, plan, say)
    pins = wheels.read_pins(wheels.fetch_sglang(request))
    built = []
    if with_kernels:
        overlay = kernels.install_overlay(request, _overlay_versions(request))
        built = kernels.build_all(request, plan, overlay, say)
    pack.copy_lab(request)
    _write_fixtures(request, say)
    torch = next((spec.version for spec in pins["torch"].specifier), "") if "torch" in pins else ""
    pack.write_activate(request, torch)
    pack.write_manifest(request, built, wheels.unmet(request.site), {"torch": torch, "fixtures": list(request.fixtures)})
    if request.split_mib:
        say("packing ...")
        parts = pack.split(request)
        say(f"{len(parts)} parts, {sum(part.stat().st_size for part in parts) / 2**20:.1f} MiB, in {parts[0].parent}")
    return request.bundle


def _check_space(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise LabError(f"{directory}: {error.strerror}; choose a folder that can be written", exit_code=2) from error
    if free < NEEDED_BYTES:
        raise LabError(
            f"{directory}: {free / 2**30:.1f} GiB free, a bundle needs {NEEDED_BYTES >> 30} GiB while it is made", exit_code=3
        )


def _install_once(request: Request, plan: Recipe, say: Callable[[str], None]) -> None:
    asked = [
        request.sglang,
        request.python,
        request.arch,
        request.glibc,
        request.machine,
        sorted(request.keep),
        dict(request.host),
        repr(plan),
    ]
    fingerprint = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    stamp = request.scratch / "site.sha256"
    if stamp.exists() and stamp.read_text() == fingerprint and request.site.is_dir():
        say("wheels: installed before")
        return
    say(f"wheels: SGLang {request.sglang} for Python {request.python}, about two minutes and 1 GB of downloads")
    request.scratch.mkdir(parents=True, exist_ok=True)
    wheels.install(request, plan)
    for conflict in wheels.conflicts(request.site):
        say(f"  note: {conflict}")
    stamp.write_text(fingerprint)


def _overlay_versions(request: Request) -> list[str]:
    """What the building interpreter needs at the very versions of the site folder, or the cache names would not match."""
    wanted = ("sglang", "flashinfer-python", "apache-tvm-ffi")
    found = {recipe.canonical(item.name): item.version for item in importlib.metadata.distributions(path=[str(request.site)])}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise LabError(
            f"{request.site} lacks {', '.join(missing)}: this SGLang is too old for kernels built beforehand; pass --no-kernels"
        )
    return [f"{name}=={found[name]}" for name in wanted]


def _check_fixtures(request: Request) -> None:
    if request.fixtures:
        from nvfp4lab.nvfp4 import fixtures  # here: imports torch

        for name in request.fixtures:
            fixtures.check_name(name)


def _write_fixtures(request: Request, say: Callable[[str], None]) -> None:
    if not request.fixtures:
        return
    from nvfp4lab.nvfp4 import fixtures  # here: imports torch

    for name in request.fixtures:
        say(f"fixture {name}")
        fixtures.build(name, request.bundle / "models" / name)
