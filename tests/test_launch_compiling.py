"""A server with a compiler among its descendants is compiling, and is given time while the compiler works."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from nvfp4lab.server.launch import Limits, Server, StartFailed
from nvfp4lab.server.states import State

FAKE = Path(__file__).with_name("launch_fake_server.py")

# Runs what looks like ptxas for a while (busy or asleep), then serves.
COMPILES = """
import subprocess, sys, runpy
subprocess.run([sys.argv[1], "-I", "-S", "-c", sys.argv[2]])
sys.argv = [sys.argv[4], sys.argv[3], "healthy"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BUSY = "import time\nend = time.monotonic() + 3.0\nwhile time.monotonic() < end: pass"
ASLEEP = "import time; time.sleep(30)"


@pytest.fixture
def ptxas(tmp_path) -> Path:
    """A copy of the interpreter under the compiler's name: the kernel names a process after its file."""
    real = Path(sys.executable).resolve()
    copy = tmp_path / "bin" / "ptxas"
    copy.parent.mkdir()
    shutil.copy(real, copy)
    (tmp_path / "bin" / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    return copy


def compiling_server(tmp_path, ptxas: Path, work: str, limits: Limits, seen: list) -> Server:
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", COMPILES, str(ptxas), work, str(port), str(FAKE)]

    env = os.environ | {"LD_LIBRARY_PATH": f"{Path(sys.base_prefix) / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    return Server("compiles", command, env, tmp_path, limits, lambda state, seconds: seen.append(state))


def test_compiling_is_a_state_and_progress(tmp_path, ptxas):
    seen = []
    limits = Limits(idle_s=2.0, spinning_s=2.0, term_s=1, poll_s=0.02)
    with compiling_server(tmp_path, ptxas, BUSY, limits, seen) as server:
        assert server.outcome.seconds > 3.0
    assert seen.index(State.COMPILING) < seen.index(State.READY)


def test_a_compiler_that_does_nothing_is_a_hang(tmp_path, ptxas):
    seen = []
    limits = Limits(idle_s=2.0, spinning_s=2.0, term_s=1, poll_s=0.02)
    with pytest.raises(StartFailed, match="while compiling") as failed:
        compiling_server(tmp_path, ptxas, ASLEEP, limits, seen).start()
    assert failed.value.outcome.state is State.HUNG
