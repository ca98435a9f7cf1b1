"""What makes the folder usable on the GPU host: the lab itself, the `activate` script, the manifest, and the archive in parts."""

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import nvfp4lab
from nvfp4lab.bundle.kernels import Built
from nvfp4lab.bundle.recipe import Request
from nvfp4lab.errors import LabError

ACTIVATE = """\
# Source this file in bash: `. activate`. It changes environment variables only.
NVFP4LAB_BUNDLE="$(cd "$(dirname "${{BASH_SOURCE[0]:-$0}}")" && pwd)"
export NVFP4LAB_BUNDLE
export PYTHONPATH="$NVFP4LAB_BUNDLE/site:$NVFP4LAB_BUNDLE/lab/lib${{PYTHONPATH:+:$PYTHONPATH}}"
export PATH="$NVFP4LAB_BUNDLE/bin:$PATH"
# The kernels compiled beforehand; what is missing there is compiled into the same place.
export TVM_FFI_CACHE_DIR="$NVFP4LAB_BUNDLE/cache/tvm-ffi"
export FLASHINFER_WORKSPACE_BASE="$NVFP4LAB_BUNDLE/cache/flashinfer"
export NVFP4LAB_CACHE="$NVFP4LAB_BUNDLE"  # fixture models lie in models/
export JUPYTER_PATH="$NVFP4LAB_BUNDLE/site/share/jupyter${{JUPYTER_PATH:+:$JUPYTER_PATH}}"  # templates of nbconvert
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ -z "${{CUDA_HOME:-}}" ]; then
  CUDA_HOME=/usr/local/cuda
  nvcc="$(command -v nvcc 2>/dev/null)" && CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
  [ -e "$CUDA_HOME/include/cuda_runtime.h" ] || CUDA_HOME=/usr/local/cuda  # nvcc on PATH may be a wrapper elsewhere
  export CUDA_HOME
fi
python3 - <<'CHECK' || echo "nvfp4lab bundle: read the lines above before starting a server" >&2
import sys
ok = True
def complain(text):
    global ok
    ok = False
    print("nvfp4lab bundle: " + text, file=sys.stderr)
if "%d.%d" % sys.version_info[:2] != "{python}":
    complain("made for Python {python}, python3 here is %d.%d" % sys.version_info[:2])
try:
    from importlib.metadata import version
    torch = version("torch").split("+")[0]
    if "{torch}" and torch != "{torch}":
        complain("SGLang {sglang} wants torch {torch}, here is " + torch)
except Exception as error:
    complain("no torch here (%s); the host must bring torch {torch}" % error)
sys.exit(not ok)
CHECK
"""

UNPACK = """\
#!/bin/sh
# Checks the parts and unpacks them: sh unpack.sh [FOLDER]
set -e
here="$(cd "$(dirname "$0")" && pwd)"
(cd "$here" && sha256sum --quiet -c SHA256SUMS)
mkdir -p "${1:-.}"
cat "$here"/bundle.tar.xz.* | tar -xJ -C "${1:-.}"
# Byte code once, now: without it each first start compiles thousands of modules, and a read-only folder never keeps it.
! command -v python3 >/dev/null || python3 -m compileall -q -j 0 "${1:-.}/bundle/site" "${1:-.}/bundle/lab" >/dev/null 2>&1 || true
echo "unpacked; next: . ${1:-.}/bundle/activate"
"""

LAUNCHER = '#!/bin/sh\nexec python3 -m nvfp4lab "$@"\n'


def copy_lab(request: Request) -> None:
    """The lab as it runs here: its package, its entry points, and notebooks and params where it runs from a checkout."""
    lab = request.bundle / "lab"
    shutil.rmtree(lab, ignore_errors=True)
    package = Path(nvfp4lab.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints")
    shutil.copytree(package, lab / "lib/nvfp4lab", ignore=ignore)
    root = package.parent.parent
    if (root / "pyproject.toml").exists():
        for name in ("notebooks", "params"):
            if (root / name).is_dir():
                shutil.copytree(root / name, lab / name, ignore=ignore)
    _copy_entry_points(lab / "lib")
    launcher = request.bundle / "bin/nvfp4lab"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)


def _copy_entry_points(library: Path) -> None:
    """The metadata by which papermill finds the lab's engine."""
    distribution = importlib.metadata.distribution("nvfp4lab")
    folder = library / f"nvfp4lab-{distribution.version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(name)
        if text:
            (folder / name).write_text(text, encoding="utf-8")


def write_activate(request: Request, torch: str) -> Path:
    """The script that a user sources on the GPU host. `torch`: version that this SGLang pins, "" where it pins none."""
    path = request.bundle / "activate"
    path.write_text(ACTIVATE.format(python=request.python, torch=torch, sglang=request.sglang))
    return path


def write_manifest(request: Request, built: Iterable[Built], not_carried: list[str], extra: dict[str, Any]) -> Path:
    """manifest.json: what is inside, what each kernel module cost, and `not_carried`: packages that those inside name."""
    packages = {item.name: item.version for item in importlib.metadata.distributions(path=[str(request.site)])}
    modules = {
        item.name: {"library": item.library, "sha256": item.sha256, "build_s": item.seconds}
        if item.library
        else {"absent": item.absent}
        for item in built
    }
    record = {
        "sglang": request.sglang,
        "python": request.python,
        "arch": request.arch,
        **extra,
        "not_carried": not_carried,
        "kernels": modules,
        "packages": dict(sorted(packages.items())),
    }
    path = request.bundle / "manifest.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


class PartWriter:
    """A write-only binary stream cut into files `bundle.tar.xz.000`, `.001`, ... of `part_bytes` each; `sums` are their SHA-256."""

    def __init__(self, folder: Path, part_bytes: int):
        self.folder, self.part_bytes = folder, part_bytes
        self.sums: list[tuple[str, str]] = []
        self._file: BinaryIO | None = None
        self._room = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if self._room == 0:
                self._next()
            piece = view[: self._room]
            self._file.write(piece)
            self._digest.update(piece)
            self._room -= len(piece)
            view = view[len(piece) :]
        return len(data)

    def close(self) -> None:
        """Finish the current part."""
        if self._file:
            self._file.close()
            self.sums.append((self._digest.hexdigest(), Path(self._file.name).name))
            self._file = None

    def _next(self) -> None:
        self.close()
        self._file = (self.folder / f"bundle.tar.xz.{len(self.sums):03d}").open("wb")
        self._digest = hashlib.sha256()
        self._room = self.part_bytes


def split(request: Request) -> list[Path]:
    """`DIR/parts`: the bundle as tar.xz in parts of at most `split_mib`, SHA256SUMS and unpack.sh. Returns the parts."""
    folder = request.directory / "parts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = PartWriter(folder, request.split_mib << 20)
    try:
        _compress(request.bundle, writer)
    except OSError as error:
        raise LabError(f"writing {folder}: {error}; free space and run the same command again", exit_code=3) from error
    finally:
        writer.close()
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in writer.sums))
    (folder / "unpack.sh").write_text(UNPACK)
    return [folder / name for _, name in writer.sums]


def _compress(bundle: Path, writer: PartWriter) -> None:
    xz = shutil.which("xz")
    if xz is None:
        with tarfile.open(fileobj=writer, mode="w|xz") as archive:
            archive.add(bundle, arcname=bundle.name)
        return
    # The xz program uses all cores, Python's own module one.
    process = subprocess.Popen([xz, "-T0", "-6", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tar = subprocess.Popen(["tar", "-C", bundle.parent, "-cf", "-", bundle.name], stdout=process.stdin)
    process.stdin.close()
    while chunk := process.stdout.read(1 << 20):
        writer.write(chunk)
    if tar.wait() or process.wait():
        raise OSError(f"tar ended with {tar.returncode}, xz with {process.wait()}")
