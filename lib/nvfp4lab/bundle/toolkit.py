"""The CUDA toolkit that compiles: nvcc, and what a machine without a driver or with a trimmed toolkit lacks."""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

from nvfp4lab.bundle.wheels import run_pip
from nvfp4lab.errors import LabError

MATH_HEADERS = (("cublasLt.h", "nvidia-cublas"), ("curand_kernel.h", "nvidia-curand"))


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """home: the toolkit's folder; release: of its nvcc, "13.0"; headers, libraries: extra search folders, made by `find`."""

    home: Path
    release: str
    headers: Path | None
    libraries: Path

    @classmethod
    def find(cls, scratch: Path) -> "Toolkit":
        """The toolkit of this machine; missing pieces are put below `scratch`. Raises LabError without nvcc or a C compiler."""
        home = find_cuda_home()
        release = nvcc_release(home)
        return cls(home, release, _math_headers(home, release, scratch), _driver_stub(scratch))

    def environment(self) -> dict[str, str]:
        """Variables under which nvcc and the linker find everything."""
        found = {"CUDA_HOME": str(self.home), "LIBRARY_PATH": _join(self.libraries, "LIBRARY_PATH")}
        return found | ({"CPATH": _join(self.headers, "CPATH")} if self.headers else {})


def _join(folder: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))


def find_cuda_home() -> Path:
    """CUDA_HOME, CUDA_PATH, beside `nvcc` on PATH, /usr/local/cuda: the first that holds nvcc. Raises LabError when none does."""
    on_path = shutil.which("nvcc")
    named = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        Path(on_path).resolve().parent.parent if on_path else None,
        "/usr/local/cuda",
    ]
    for home in filter(None, named):
        if (Path(home) / "bin/nvcc").is_file() and (Path(home) / "include/cuda_runtime.h").is_file():
            return Path(home)
    raise LabError(
        "no CUDA toolkit with nvcc here; install one of the GPU host's CUDA release and set CUDA_HOME, or pass --no-kernels",
        exit_code=3,
    )


def nvcc_release(home: Path) -> str:
    """Such as "13.0". Raises LabError when nvcc does not run."""
    try:
        text = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabError(f"{home}/bin/nvcc does not run: {error}", exit_code=3) from error
    found = re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise LabError(f"{home}/bin/nvcc --version names no release", exit_code=3)
    return found[1]


def check_target(arch: str) -> None:
    """Raises LabError unless what compiles is here and builds for `arch`, "9.0a" say; asked before a gigabyte is fetched."""
    home = find_cuda_home()
    release, number = nvcc_release(home), arch.replace(".", "")
    c_compiler()
    asked = ["--dryrun", "-gencode", f"arch=compute_{number},code=sm_{number}", "-x", "cu", "-c", "/dev/null", "-o", "unused.o"]
    said = subprocess.run([home / "bin/nvcc", *asked], capture_output=True, text=True)
    if said.returncode:
        reason = (said.stderr.strip().splitlines() or ["no reason given"])[0]
        raise LabError(f"--arch {arch}: nvcc {release} does not build for it ({reason})", exit_code=2)


def c_compiler() -> str:
    """Path of cc or gcc. Raises LabError when there is neither."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise LabError("no C compiler (cc) here; nvcc needs one too: install gcc or clang", exit_code=3)
    return compiler


def _driver_stub(scratch: Path) -> Path:
    """Folder with an empty libcuda.so: FlashInfer links against the driver, which only a GPU host has."""
    folder = scratch / "stubs"
    library = folder / "libcuda.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [c_compiler(), "-shared", "-x", "c", "/dev/null", "-o", library, "-Wl,-soname,libcuda.so.1"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def _math_headers(home: Path, release: str, scratch: Path) -> Path | None:
    """Folder with the headers in MATH_HEADERS, from PyPI; None where the toolkit has them, as full ones do.

    FlashInfer's FP4 quantiser includes them; toolkits without math libraries lack them.
    """
    if all((home / "include" / name).exists() for name, _ in MATH_HEADERS):
        return None
    folder = scratch / "headers"
    major = release.split(".")[0]
    suffix = "" if int(major) >= 13 else f"-cu{major}"
    for header, package in MATH_HEADERS:
        if not next(folder.rglob(header), None):
            pin = f"=={release}.*" if package == "nvidia-cublas" else ""  # the others count their releases in their own way
            run_pip(
                "install", "-q", "--no-compile", "--no-deps", "--upgrade", "--target", folder / package, f"{package}{suffix}{pin}"
            )
            for library in folder.rglob("*.so*"):
                library.unlink()  # only headers are wanted; the libraries are half a gigabyte
    merged = folder / "include"
    for header, package in MATH_HEADERS:
        found = next((folder / package).rglob(header))
        shutil.copytree(found.parent, merged, dirs_exist_ok=True)
    return merged
