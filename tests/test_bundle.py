"""The bundle, without network and nvcc: packages chosen and trimmed, modules built once, parts that come together again."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from nvfp4lab import cli
from nvfp4lab.bundle import build_module, kernels, make, pack, recipe, toolkit, wheels
from nvfp4lab.bundle.recipe import Module, Request
from nvfp4lab.errors import LabError


@pytest.fixture
def request_(tmp_path) -> Request:
    request = Request(sglang="0.5.17", python="3.12", arch="9.0a", directory=tmp_path / "out", split_mib=1)
    request.site.mkdir(parents=True)
    request.scratch.mkdir(parents=True)
    return request


def add_package(site: Path, name: str, version: str, requires: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> None:
    """A package as pip leaves it: a module, other files, and metadata that lists them."""
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    files = (f"{name.replace('-', '_')}/__init__.py", *files)
    for file in files:
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in requires)]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    recorded = [*files, f"{metadata.name}/METADATA", f"{metadata.name}/RECORD"]
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in recorded))


def test_the_recipe_is_whole():
    plan = recipe.load()
    assert {module.package for module in plan.modules} == {"sglang", "flashinfer"}
    assert [module.minutes for module in plan.modules] == sorted((module.minutes for module in plan.modules), reverse=True)
    for text in (*plan.alone, *plan.with_requirements):
        Requirement(text)
    assert all(":" in place for module in plan.modules for place in module.functions)


@pytest.mark.parametrize(
    "change", [{"python": "3"}, {"python": "3.12.1"}, {"arch": "90"}, {"arch": "sm_90"}, {"split_mib": 0}, {"jobs": 0}]
)
def test_a_request_that_cannot_be_met_is_refused_at_once(change, tmp_path):
    fine = {"sglang": "0.5.17", "python": "3.12", "arch": "9.0a", "directory": tmp_path}
    with pytest.raises(LabError, match=next(iter(change)).replace("_", "-")):
        Request(**fine | change)


@pytest.mark.parametrize(
    ("arch", "capability", "family"),
    [("9.0a", (9, 0), "90"), ("12.0f", (12, 0), "120f"), ("12.1a", (12, 1), "121"), ("10.0a", (10, 0), "100")],
)
def test_names_of_an_architecture(arch, capability, family, tmp_path):
    request = Request(sglang="1", python="3.12", arch=arch, directory=tmp_path)
    assert (request.capability, request.family) == (capability, family)


def test_pip_is_asked_for_the_hosts_python_and_c_library(request_):
    arguments = wheels.pip_arguments(dataclasses.replace(request_, glibc="2.34"))
    assert arguments[arguments.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_34_x86_64" in arguments and "manylinux_2_35_x86_64" not in arguments
    assert {"cp312", "abi3", "none"} == {arguments[i + 1] for i, word in enumerate(arguments) if word == "--abi"}


def test_sglangs_own_pin_wins_and_its_kernel_package_is_the_one_it_names():
    pins = {"transformers": Requirement("transformers==5.12.1"), "sglang-kernel": Requirement("sglang-kernel==0.4.5")}
    chosen = wheels.specifiers(["transformers", "tokenizers<=0.23.0", "sglang-kernel", "sgl-kernel"], pins)
    assert chosen == ["transformers==5.12.1", "tokenizers<=0.23.0", "sglang-kernel==0.4.5"]
    newer = {
        "tokenizers": Requirement("tokenizers==0.23.2"),
        "numpy": Requirement("numpy"),
    }  # of SGLang 0.5.23, which contradicts ours
    assert wheels.specifiers(["tokenizers<=0.23.0", "numpy<3"], newer) == ["tokenizers==0.23.2", "numpy<3"]


def test_what_the_host_has_is_not_carried(request_):
    """Torch never; a package the host has if its version fits what stays; and what only a dropped package pinned goes too."""
    site = request_.site
    add_package(site, "sglang", "0.5.17", ("transformers==5.12.1", "torch==2.11.0", "numba==0.65.1"))
    add_package(site, "torch", "2.11.0")
    add_package(site, "nvidia-cudnn", "9.0")
    add_package(site, "transformers", "5.12.1", files=("transformers/models/a.py",))
    add_package(site, "numba", "0.65.1", ("numpy<2.5",))
    add_package(site, "numpy", "2.4.0")
    host = {"transformers": "5.17.0", "numba": None, "numpy": "2.5.2"}
    dropped = wheels.drop_host_packages(site, ["torch", "nvidia-*"], host)
    assert sorted(dropped) == ["numba", "numpy", "nvidia-cudnn", "torch"]
    assert sorted(path.name for path in site.iterdir()) == [
        "sglang",
        "sglang-0.5.17.dist-info",
        "transformers",
        "transformers-5.12.1.dist-info",
    ]
    assert wheels.unmet(site) == ["numba", "torch"]


def test_versions_that_do_not_fit_are_named(request_):
    add_package(request_.site, "transformers", "5.12.1", ("huggingface-hub<2.0",))
    add_package(request_.site, "huggingface-hub", "2.4.0")
    assert wheels.conflicts(request_.site) == ["huggingface-hub 2.4.0 is there, but something asks for <2.0"]


@pytest.mark.parametrize("wrong", [{"keep": frozenset({"nothing"})}, {"fixtures": ("smol-nvfp4", "smol-typo")}])
def test_a_wrong_name_is_said_before_anything_is_fetched(request_, monkeypatch, wrong):
    monkeypatch.setattr(make, "_install_once", lambda *_: pytest.fail("packages were fetched first"))
    monkeypatch.setattr(make, "_check_space", lambda *_: None)
    with pytest.raises(LabError, match=r"known are|there are: smol-bf16"):
        make.make(dataclasses.replace(request_, **wrong))


def test_trimming_keeps_what_is_asked_for(request_):
    plan = recipe.load()
    kept = dataclasses.replace(request_, keep=frozenset({"flash-attention"}))
    assert "sgl_kernel/flash_ops*" in wheels.globs(request_, plan) and "sgl_kernel/flash_ops*" not in wheels.globs(kept, plan)
    for name in (
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.so",
        "sgl_kernel/sm100/common_ops.so",
        "a/__pycache__/a.pyc",
    ):
        (request_.site / name).parent.mkdir(parents=True, exist_ok=True)
        (request_.site / name).write_bytes(b"x")
    wheels.trim(request_.site, wheels.globs(request_, plan))
    assert [str(path.relative_to(request_.site)) for path in request_.site.rglob("*") if path.is_file()] == [
        "sgl_kernel/sm90/common_ops.so"
    ]
    with pytest.raises(LabError, match="known are"):
        wheels.globs(dataclasses.replace(request_, keep=frozenset({"nothing"})), plan)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "ERROR: Could not find a version that satisfies sglang==9\nERROR: No matching distribution found for sglang==9",
            "No matching",
        ),
        (
            "WARNING: NewConnectionError: Temporary failure in name resolution\nERROR: No matching distribution for sglang",
            "index cannot be reached",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full"),
    ],
)
def test_pips_failure_says_what_to_do(said, meant):
    assert meant in wheels._explain_pip(said)


def test_no_compiler_is_a_plain_error(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolkit.Path, "is_file", lambda path: False)
    with pytest.raises(LabError, match="no CUDA toolkit"):
        toolkit.find_cuda_home()


@pytest.fixture
def nvcc(tmp_path, monkeypatch) -> Path:
    """A toolkit whose nvcc only says what it is and what it builds for; CUDA_HOME names it."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    known = "*compute_90a,*|*compute_103,*|*compute_120f,*"
    refuses = "echo \"nvcc fatal   : Unsupported gpu architecture '$3'\" >&2; exit 1"
    lines = ["#!/bin/sh", 'case "$*" in', '--version) echo "release 13.0, V13.0.48";;', f"{known}) ;;", f"*) {refuses};;", "esac"]
    (home / "bin/nvcc").write_text("\n".join(lines) + "\n")
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(make, "_check_space", lambda directory: None)
    monkeypatch.setattr(make, "_install_once", lambda *_: pytest.fail("wheels are fetched"))
    return home


@pytest.mark.parametrize(("arch", "is_known"), [("9.0a", True), ("12.0f", True), ("10.3", True), ("13.0a", False), ("9.0f", False)])
def test_a_target_that_nvcc_does_not_know_is_said_before_anything_is_fetched(nvcc, request_, arch, is_known):
    asked = dataclasses.replace(request_, arch=arch)
    said = "wheels are fetched" if is_known else rf"--arch {arch}: nvcc 13\.0 does not build for it \(nvcc fatal .*compute_"
    with pytest.raises(pytest.fail.Exception if is_known else LabError, match=said):
        make.make(asked)
    with pytest.raises(pytest.fail.Exception):
        make.make(asked, with_kernels=False)


def test_a_missing_c_compiler_is_said_before_anything_is_fetched(nvcc, request_, monkeypatch):
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    with pytest.raises(LabError, match="no C compiler"):
        make.make(request_)


def test_a_full_disk_is_said_before_anything_is_fetched(monkeypatch, request_):
    monkeypatch.setattr(make.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1 << 30))
    with pytest.raises(LabError, match=r"1\.0 GiB free"):
        make.make(request_)


def test_a_function_is_found_where_this_version_keeps_it():
    assert build_module.find(["json.nowhere:dumps", "json:dumps"]) is json.dumps
    with pytest.raises(LookupError):
        build_module.find(["json:nothing", "no_such_package:f"])


def test_a_broken_import_is_not_taken_for_absence(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import missing_requirement\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="missing_requirement"):
        build_module.find(["broken_package:f"])


LOADER = """
import os, pathlib
def build(linked):
    folder = pathlib.Path(os.environ["TVM_FFI_CACHE_DIR"]) / "m"
    folder.mkdir()
    if linked:
        (folder / "m.so").write_bytes(b"x")
    raise OSError("libcuda.so.1: cannot open shared object file")
"""


def test_a_module_that_needs_the_driver_is_built_though_it_cannot_be_loaded(tmp_path, monkeypatch):
    """What was linked counts; a build that left nothing is a failure."""
    (tmp_path / "loader_of_test.py").write_text(LOADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(build_module, "fake_capability", lambda *_: None)
    job = {"functions": ["loader_of_test:build"], "arguments": [True], "capability": [9, 0]}
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "linked"))
    (tmp_path / "linked").mkdir()
    assert build_module.build_sglang(job) == tmp_path / "linked/m/m.so"
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="libcuda"):
        build_module.build_sglang(job | {"arguments": [False]})


CHILD = """
import json, os, pathlib, sys
job = json.loads(sys.argv[1])
counter = pathlib.Path({counter!r})
counter.write_text(counter.read_text() + "x" if counter.exists() else "x")
if job["functions"] == ["absent:f"]:
    print(json.dumps({{"absent": "none of absent:f"}})); sys.exit()
if job["functions"] == ["fails:f"]:
    print("kernel.cu(3): error: identifier is undefined", file=sys.stderr); sys.exit(1)
library = pathlib.Path(os.environ["TVM_FFI_CACHE_DIR"]) / "m__arch_9.0a__tvmffi_1" / "m.so"
library.parent.mkdir(parents=True)
library.write_bytes(b"machine code")
print(json.dumps({{"library": str(library)}}))
"""


@pytest.fixture
def build(request_, tmp_path, monkeypatch):
    """`build(function)` compiles a module by a stand-in for the child process; `build.count()` says how often a child ran."""
    counter = tmp_path / "count"
    child = tmp_path / "lab" / "build_module.py"
    child.parent.mkdir()
    child.write_text(CHILD.format(counter=str(counter)))
    monkeypatch.setattr(kernels, "__file__", str(child.with_name("kernels.py")))
    overlay = request_.scratch / "overlay"
    overlay.mkdir()
    (overlay / "versions.txt").write_text("sglang==0.5.17")
    tools = toolkit.Toolkit(Path("/cuda"), "13.0", None, tmp_path)

    def run(function: str = "works:f"):
        return kernels.build(request_, Module("m", "sglang", 1, (), (function,)), overlay, tools, lambda text: None)

    run.count = lambda: len(counter.read_text())
    return run


def test_a_module_is_built_once(build, request_):
    first = build()
    assert (request_.bundle / first.library).read_bytes() == b"machine code"
    assert first.library == "cache/tvm-ffi/m__arch_9.0a__tvmffi_1/m.so"
    assert build() == first and build.count() == 1
    shutil.rmtree(request_.bundle)  # the site folder is made anew when the request changes
    assert build() == first and build.count() == 1
    assert (request_.bundle / first.library).exists()


def test_a_damaged_library_is_built_again(build, request_):
    first = build()
    (request_.bundle / first.library).write_bytes(b"half")
    assert build().sha256 == first.sha256 and build.count() == 2


def test_absence_and_failure_of_a_module(build, request_):
    assert build("absent:f").library is None
    with pytest.raises(LabError, match="error: identifier is undefined"):
        build("fails:f")
    build()
    assert build.count() == 3


SLOW_MODULE = """
import pathlib, subprocess
compiler = subprocess.Popen(["sleep", "600"])
pathlib.Path({0!r}).write_text(str(compiler.pid))
compiler.wait()
"""
LAB_THAT_WAITS = """
import os, subprocess, sys
job = '{"package": "flashinfer", "functions": ["slow_module:f"], "arguments": [], "capability": [9, 0]}'
child = subprocess.Popen([sys.executable, sys.argv[1], job], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_compiler_does_not_outlive_the_lab(tmp_path):
    """The lab is killed by SIGKILL while a child process compiles: child and compiler end within seconds."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("")
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE.format(str(tmp_path / "compiler.pid")))
    command = [sys.executable, "-c", LAB_THAT_WAITS, build_module.__file__]
    lab = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    child = int(lab.stdout.readline())
    assert wait_until(lambda: (tmp_path / "compiler.pid").exists() and (tmp_path / "compiler.pid").read_text())
    compiler_pid = int((tmp_path / "compiler.pid").read_text())
    lab.kill()
    lab.wait()
    assert wait_until(lambda: not is_running(child) and not is_running(compiler_pid))


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_ends_what_is_compiling(request_, monkeypatch):
    """The first module raises KeyboardInterrupt as Ctrl-C does in the waiting thread; the second is a process that sleeps."""
    started = []

    def build(request, module, overlay, tools, say, running):
        if module.name == "interrupted":
            assert wait_until(lambda: started)
            raise KeyboardInterrupt
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        running.add(child)
        started.append(child)
        child.wait()

    monkeypatch.setattr(kernels, "build", build)
    monkeypatch.setattr(kernels.Toolkit, "find", lambda scratch: toolkit.Toolkit(Path("/cuda"), "13.0", None, scratch))
    modules = tuple(Module(name, "sglang", 1, (), ()) for name in ("interrupted", "sleeps"))
    plan = dataclasses.replace(recipe.load(), modules=modules)
    with pytest.raises(KeyboardInterrupt):
        kernels.build_all(dataclasses.replace(request_, jobs=2), plan, request_.scratch, lambda text: None)
    assert started[0].wait(timeout=10) < 0


def test_parts_come_together_again(request_, tmp_path):
    """3 MiB that do not compress, in parts of 1 MiB; a damaged part is noticed before anything is unpacked."""
    payload = os.urandom(3 << 20)
    (request_.bundle / "models").mkdir()
    (request_.bundle / "models/weights.bin").write_bytes(payload)
    parts = pack.split(request_)
    assert len(parts) == 4 and all(part.stat().st_size <= 1 << 20 for part in parts)
    unpack = ["sh", str(request_.directory / "parts/unpack.sh"), str(tmp_path / "host")]
    subprocess.run(unpack, check=True, capture_output=True)
    assert (tmp_path / "host/bundle/models/weights.bin").read_bytes() == payload
    parts[1].write_bytes(parts[1].read_bytes()[::-1])
    shutil.rmtree(tmp_path / "host")
    assert subprocess.run(unpack, capture_output=True).returncode != 0
    assert not (tmp_path / "host").exists()


def test_activate_sets_the_caches_and_warns_of_another_python(request_):
    pack.copy_lab(request_)
    path = pack.write_activate(request_, torch="1.0.0")
    script = f'. {path}; echo "$TVM_FFI_CACHE_DIR"; echo "$PYTHONPATH"; command -v nvfp4lab'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    cache, search, launcher = done.stdout.split()
    assert cache == str(request_.bundle / "cache/tvm-ffi")
    assert search.split(":")[:2] == [str(request_.bundle / "site"), str(request_.bundle / "lab/lib")]
    assert launcher == str(request_.bundle / "bin/nvfp4lab")
    wanted = "wants torch 1.0.0" if sys.version_info[:2] == (3, 12) else "made for Python 3.12"
    assert wanted in done.stderr or "no torch here" in done.stderr


def test_the_lab_in_the_bundle_runs_on_its_own(request_):
    """From the bundle's copy, not from this checkout, and with its engine's entry point."""
    pack.copy_lab(request_)
    library = request_.bundle / "lab/lib"
    code = "import nvfp4lab, importlib.metadata as m\nprint(nvfp4lab.__file__, m.entry_points(group='papermill.engine'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(library)}, capture_output=True, text=True, check=True
    )
    assert str(library) in done.stdout and "LabEngine" in done.stdout


def test_the_manifest_names_everything(request_):
    add_package(request_.site, "sglang", "0.5.17", ("torch==2.11.0",))
    built = [kernels.Built("marlin", "cache/x.so", "ab", 3.0, "f"), kernels.Built("gone", None, None, 0.1, "f", "none of a:b")]
    record = json.loads(pack.write_manifest(request_, built, wheels.unmet(request_.site), {"torch": "2.11.0"}).read_text())
    assert record["kernels"]["gone"] == {"absent": "none of a:b"}
    assert record["kernels"]["marlin"]["build_s"] == 3.0
    assert record["not_carried"] == ["torch"] and record["packages"] == {"sglang": "0.5.17"}


def test_host_packages_file(tmp_path, capsys):
    path = tmp_path / "host.txt"
    path.write_text("# comment\nTorch==2.11.0+cu130\nnumpy\n\nhuggingface_hub==1.33.0\n")
    assert recipe.read_host_packages(path) == {"torch": "2.11.0+cu130", "numpy": None, "huggingface-hub": "1.33.0"}
    arguments = [
        "bundle",
        str(tmp_path / "b"),
        "--sglang",
        "0.5.17",
        "--python",
        "3.12",
        "--arch",
        "9.0a",
        "--host-packages",
        str(tmp_path / "no"),
    ]
    assert cli.main(arguments) == 2
    assert "pip list" in capsys.readouterr().err
