"""Our engine tells an exception, a dead kernel and a timeout apart, where stock papermill says `completed`."""

import contextlib
import json
import sys
import time
from pathlib import Path

import nbformat
import papermill
import psutil
import pytest
from nbclient.exceptions import DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook


def execute(tmp_path, *sources, engine="nvfp4lab", **options):
    """(outcome metadata, cell states, executed notebook) of a notebook with these code cells."""
    path = tmp_path / "in.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources], metadata={"kernelspec": kernel}), path)
    out = tmp_path / "out.ipynb"
    with contextlib.suppress(papermill.PapermillExecutionError):
        papermill.execute_notebook(path, out, engine_name=engine, progress_bar=False, **options)
    executed = json.loads(out.read_text())
    states = [cell["metadata"]["papermill"]["status"] for cell in executed["cells"] if "papermill" in cell["metadata"]]
    return executed["metadata"].get("nvfp4lab_run"), states, executed


def test_a_sound_notebook_is_ok(tmp_path):
    outcome, states, _ = execute(tmp_path, "1 + 1", "2 + 2")
    assert (outcome["verdict"], states) == ("ok", ["completed", "completed"])


def test_an_exception_is_a_crash_with_its_own_words(tmp_path):
    outcome, states, _ = execute(tmp_path, "1 + 1", "raise ValueError('no such backend')", "3")
    assert (outcome["verdict"], outcome["cell"]) == ("crash", 1)
    assert outcome["reason"] == "ValueError: no such backend"
    assert states == ["completed", "failed", "pending"]


def test_a_dead_kernel_is_a_crash_that_names_the_signal(tmp_path):
    outcome, states, executed = execute(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "2")
    assert outcome["verdict"] == "crash"
    assert "SIGSEGV" in outcome["reason"]
    assert states == ["failed", "pending"]
    assert "SIGSEGV" in json.dumps(executed["cells"])
    assert executed["metadata"]["papermill"]["exception"] is True


def test_a_kernel_killed_after_its_last_cell_takes_nothing_away(tmp_path, monkeypatch):
    """The outcome is on disk before the kernel is asked once more, or shut down."""
    on_disk = []

    def dead(client, *_):
        on_disk.append(json.loads((tmp_path / "out.ipynb").read_text())["metadata"]["nvfp4lab_run"]["verdict"])
        raise DeadKernelError("Kernel died")

    monkeypatch.setattr("nvfp4lab.batch.engine.LabNotebookClient.wait_for_reply", dead)
    outcome, states, _ = execute(tmp_path, "1 + 1")
    assert (on_disk, outcome["verdict"], states) == (["ok"], "ok", ["completed"])


def test_a_kernel_is_killed_with_who_started_it(tmp_path):
    """Not a second later, as ipykernel does by itself: its cell must not come to an end any more."""
    begun = tmp_path / "begun"
    source = f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(30)"
    script = f"import sys, pathlib\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_engine import execute\n"
    script += f"execute(pathlib.Path({str(tmp_path)!r}), {source!r})"
    parent = psutil.Popen([sys.executable, "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    [kernel] = parent.children()
    parent.kill()
    time.sleep(0.1)
    assert not kernel.is_running() or kernel.status() == psutil.STATUS_ZOMBIE


def test_stock_papermill_still_needs_our_engine(tmp_path):
    """If this fails, papermill has learnt to tell, and the engine can go."""
    with pytest.raises(Exception, match=r"[Dd]ied"):
        execute(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "2", engine=None)
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    assert [cell["metadata"]["papermill"]["status"] for cell in cells] == ["completed", "completed"]


def test_a_cell_past_its_limit_is_a_hang(tmp_path):
    outcome, states, _ = execute(tmp_path, "import time\ntime.sleep(60)", "2", execution_timeout=1)
    assert outcome["verdict"] == "hang"
    assert "1 s" in outcome["reason"]
    assert states == ["failed", "pending"]


def test_outputs_are_redacted_on_the_way_to_disk(tmp_path):
    _, _, executed = execute(tmp_path, "print('HF_' + 'TOKEN=' + 'hf_' + 'a' * 30)")
    assert "hf_aaa" not in json.dumps(executed)
    assert "[redacted]" in json.dumps(executed)


def test_a_chatty_cell_leaves_one_output_a_stream(tmp_path):
    body = "print(n, file=sys.stderr, flush=True)", "print(n, flush=True)", "time.sleep(0.05)"
    loop = "import sys, time\nfor n in range(5):\n    " + "\n    ".join(body)
    _, _, executed = execute(tmp_path, loop)
    assert sorted(output["name"] for output in executed["cells"][-1]["outputs"]) == ["stderr", "stdout"]
