"""Every command of the README does what it says. `make demo` is test_demo, `make test` is what runs this."""

import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nvfp4lab import cli
from nvfp4lab.batch import plan
from nvfp4lab.bundle import recipe, wheels
from nvfp4lab.nvfp4 import fixtures

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    line.strip()
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
GPU_HOST = ["pip install -e '.[gpu]'", "nvfp4lab run params/rtx_pro_6000.yaml"]
BUNDLE = [command for command in COMMANDS if "bundle" in command]
JUPYTER = [command for command in COMMANDS if "jupyter lab" in command]
DIRECT = [command for command in COMMANDS if command not in {*MAKE, *GPU_HOST, *BUNDLE, *JUPYTER}]


@pytest.fixture(scope="module")
def checkout(root, tmp_path_factory) -> Path:
    """A folder like a fresh checkout: the real notebooks and params, an outputs folder of its own."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("notebooks", "params", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(root / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (folder / "outputs").mkdir()
    return folder


def test_the_readme_has_commands_of_every_sort():
    assert MAKE == ["make demo", "make test"]
    assert len(JUPYTER) == 1
    assert set(GPU_HOST) <= set(COMMANDS)
    assert len(DIRECT) >= 8


@pytest.mark.wheel
@pytest.mark.parametrize("command", DIRECT)
def test_a_command_runs(checkout, command):
    done = subprocess.run(shlex.split(command), cwd=checkout, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_make_targets_are_there(root):
    for command in MAKE:
        assert subprocess.run([*command.split(), "-n"], cwd=root, capture_output=True).returncode == 0


def test_the_gpu_extra_and_the_gpu_params_are_there(root, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "-q", "-e", f"{root}[gpu]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "does not provide the extra" not in done.stderr
    assert plan.of_params([root / "params" / "rtx_pro_6000.yaml"], [], tmp_path).pieces


def test_the_bundle_that_is_named_can_be_asked_for(tmp_path):
    making, sourcing = BUNDLE
    args = cli.build_parser("bundle").parse_args(shlex.split(making)[1:])
    request = recipe.Request(args.sglang, args.python, args.arch, tmp_path, keep=frozenset(args.keep), fixtures=tuple(args.fixture))
    wheels.globs(request, recipe.load())  # raises for a --keep that does not exist
    assert fixtures.FIXTURES.keys() >= set(request.fixtures)
    assert sourcing.split()[1] == f"{args.directory}/bundle/activate"


def test_jupyterlab_opens_the_first_notebook(root):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", f"--port={port}", "--ServerApp.port_retries=0", "--ServerApp.token=x", "--allow-root"]
    [command] = JUPYTER
    words = [sys.executable, "-m", "jupyterlab", *options, *shlex.split(command)[2:]]
    server = subprocess.Popen(words, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # The page answers 200 for any name; the file itself only where it is, seen from the folder that JupyterLab serves.
        for path in ("lab/tree", "api/contents"):
            assert _status(f"http://127.0.0.1:{port}/{path}/notebooks/00_start_here.ipynb?token=x", within_s=90) == 200
    finally:
        server.terminate()
        server.wait(timeout=30)


def _status(address: str, within_s: float) -> int | None:
    """HTTP status of `address` once something listens there; None when nothing does within `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            return urllib.request.urlopen(address, timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            time.sleep(0.5)
    return None
