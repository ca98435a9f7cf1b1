"""Packages for the GPU host's Python: installed by pip for that version, then trimmed.

Dropped: what the host has already, what it must bring itself (torch), and what serving never reads.
"""

import fnmatch
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from nvfp4lab.bundle.recipe import Recipe, Request, canonical
from nvfp4lab.errors import LabError


def pip_arguments(request: Request) -> list[str]:
    """pip options that choose wheels for the host instead of for this interpreter.

    pip compares manylinux tags by equality, so each is named.
    """
    newest = int(request.glibc.split(".")[1])
    platforms = [f"manylinux_2_{minor}_{request.machine}" for minor in range(newest, 4, -1)]
    platforms += [f"manylinux{year}_{request.machine}" for year in (2014, 2010, 1)] + [f"linux_{request.machine}"]
    tag = "cp" + request.python.replace(".", "")
    return [
        *("--python-version", request.python, "--implementation", "cp", "--only-binary", ":all:"),
        *(item for abi in (tag, "abi3", "none") for item in ("--abi", abi)),
        *(item for platform in platforms for item in ("--platform", platform)),
    ]


def run_pip(*arguments: str | Path) -> None:
    """Run this interpreter's pip; a failure becomes a LabError that carries pip's own reason and what to do."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise LabError(f"pip cannot be started: {error}", exit_code=3) from error
    if done.returncode:
        raise LabError(_explain_pip(done.stdout + done.stderr), exit_code=3)


def _explain_pip(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    decisive = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no output")
    lower = output.lower()
    if "no space left" in lower:
        return f"disk full while installing wheels: {decisive}; free space or choose another DIR, then run the same command again"
    if any(sign in lower for sign in ("name resolution", "max retries", "connection", "timed out", "newconnectionerror")):
        return f"the package index cannot be reached: {decisive}; a bundle is built on a machine that has one (`pip config list`)"
    return f"pip: {decisive}"


def fetch_sglang(request: Request) -> Path:
    """The SGLang wheel for the host's Python, downloaded once. Raises LabError when there is none."""
    folder = request.scratch / "wheels"
    pattern = f"sglang-{request.sglang}-*.whl"
    if not list(folder.glob(pattern)):
        run_pip("download", "-q", "--no-deps", "-d", folder, *pip_arguments(request), f"sglang=={request.sglang}")
    return next(iter(folder.glob(pattern)))


def read_pins(wheel: Path) -> dict[str, Requirement]:
    """SGLang's own requirements without extras, by canonical name."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    return {canonical(need.name): need for need in _requirements(headers.get_all("Requires-Dist") or ())}


def _requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    for line in lines:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        if need.marker is None or need.marker.evaluate({"extra": "", "sys_platform": "linux", "platform_machine": "x86_64"}):
            yield need


def specifiers(names: Iterable[str], pins: Mapping[str, Requirement]) -> list[str]:
    """Requirement strings for `names`; SGLang's own pin wins, and a kernel package that this SGLang does not name is left out."""
    chosen = []
    for text in names:
        own = Requirement(text)
        pin = pins.get(canonical(own.name))
        if pin is None and canonical(own.name) in ("sglang-kernel", "sgl-kernel"):
            continue  # renamed between SGLang versions: each names one of the two
        chosen.append(f"{own.name}{(pin and pin.specifier) or own.specifier}")
    return chosen


def install(request: Request, recipe: Recipe) -> dict[str, Requirement]:
    """Fill `request.site`; returns SGLang's pins. The folder is complete or absent: it is filled under another name first."""
    wheel = fetch_sglang(request)
    pins = read_pins(wheel)
    filling = request.scratch / "site"
    shutil.rmtree(filling, ignore_errors=True)
    constraints = request.scratch / "constraints.txt"
    constraints.write_text("\n".join(f"{pin.name}{pin.specifier}" for pin in pins.values() if pin.specifier) + "\n")
    options = ["install", "-q", "--no-compile", "--no-warn-conflicts", "--target", filling, *pip_arguments(request)]
    run_pip(*options, "-c", constraints, *specifiers(recipe.with_requirements, pins))
    alone = [text for text in specifiers(recipe.alone, pins) if not text.startswith("sglang=") and text != "sglang"]
    run_pip(*options, "--no-deps", "--upgrade", wheel, *alone)
    drop_host_packages(filling, recipe.host_brings, request.host)
    trim(filling, globs(request, recipe))
    strip_libraries(filling)
    shutil.rmtree(request.site, ignore_errors=True)
    request.bundle.mkdir(parents=True, exist_ok=True)
    filling.rename(request.site)
    return pins


def globs(request: Request, recipe: Recipe) -> list[str]:
    """What `trim` drops for this architecture and these --keep names. Raises LabError for an unknown --keep."""
    unknown = request.keep - recipe.trim_optional.keys()
    if unknown:
        raise LabError(f"--keep {sorted(unknown)[0]}: known are {', '.join(recipe.trim_optional)}", exit_code=2)
    optional = [pattern for name, patterns in recipe.trim_optional.items() if name not in request.keep for pattern in patterns]
    other = recipe.trim_other_architecture.get(str(request.capability[0]), ())
    return [*recipe.trim_always, *optional, *other]


def trim(site: Path, patterns: Iterable[str]) -> None:
    """Delete what the globs match inside `site`."""
    for pattern in patterns:
        for path in list(site.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def strip_libraries(site: Path, at_least_bytes: int = 4 << 20) -> None:
    """Drop debug sections of large shared libraries where binutils is here; a library that `strip` refuses stays as it is."""
    strip = shutil.which("strip")
    for library in site.rglob("*.so*") if strip else ():
        if library.is_file() and library.stat().st_size >= at_least_bytes:
            subprocess.run([strip, "--strip-debug", library], capture_output=True)


def drop_host_packages(site: Path, host_brings: Iterable[str], host: Mapping[str, str | None]) -> list[str]:
    """Remove what the host brings: `host_brings` patterns always, `host` where its version meets what stays in the site asks.

    Repeated until nothing changes: a package that goes takes its own requirements along.
    """
    dropped: list[str] = []
    while True:
        needs = _needs(site)
        gone = [item for item in importlib.metadata.distributions(path=[str(site)]) if _is_brought(item, needs, host_brings, host)]
        if not gone:
            return dropped
        dropped += [canonical(distribution.name) for distribution in gone]
        for distribution in gone:
            _remove(site, distribution)


def _is_brought(item: importlib.metadata.Distribution, needs, host_brings: Iterable[str], host: Mapping[str, str | None]) -> bool:
    name = canonical(item.name)
    if any(fnmatch.fnmatch(name, pattern) for pattern in host_brings):
        return True
    return name in host and all(_meets(host[name], need) for need in needs.get(name, ()))


def _needs(site: Path) -> dict[str, list[Requirement]]:
    needs: dict[str, list[Requirement]] = {}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for need in _requirements(distribution.requires or ()):
            needs.setdefault(canonical(need.name), []).append(need)
    return needs


def _meets(version: str | None, need: Requirement) -> bool:
    return version is None or need.specifier.contains(version, prereleases=True)


def _remove(site: Path, distribution: importlib.metadata.Distribution) -> None:
    parents = set()
    for file in distribution.files or ():
        path = site / file
        if site in path.resolve().parents and path.is_file():
            path.unlink()
            parents.update(path.relative_to(site).parents)
    for parent in sorted(parents - {Path()}, key=lambda path: -len(path.parts)):
        folder = site / parent
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def unmet(site: Path) -> list[str]:
    """Requirements of what is in `site` that nothing in it provides: the host brings them, or serving never imports them."""
    present = {canonical(distribution.name) for distribution in importlib.metadata.distributions(path=[str(site)])}
    return sorted(name for name in _needs(site) if name not in present)


def conflicts(site: Path) -> list[str]:
    """Packages in `site` whose version another one there refuses, as sentences for a person to judge."""
    versions = {canonical(item.name): item.version for item in importlib.metadata.distributions(path=[str(site)])}
    return sorted(
        f"{name} {versions[name]} is there, but something asks for {need.specifier}"
        for name, needs in _needs(site).items()
        if name in versions
        for need in needs
        if not _meets(versions[name], need)
    )
