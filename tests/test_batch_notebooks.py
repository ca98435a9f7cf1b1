"""A notebook as a piece: its page exists however it ended, and servers of a dead kernel are found and ended."""

import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from nvfp4lab import params
from nvfp4lab.batch import cleanup, notebooks, plan
from nvfp4lab.batch import run as coordinator
from nvfp4lab.batch.piece import Piece
from nvfp4lab.batch.piece import execute as execute_piece
from nvfp4lab.batch.plan import Plan
from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Verdict

COMMITTED = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
FAKE = Path(__file__).with_name("launch_fake_server.py")

STARTS_A_SERVER_AND_DIES = """
import os, signal, sys
from pathlib import Path
from nvfp4lab.server import processes
from nvfp4lab.server.launch import fresh_port
port = fresh_port()
command = [sys.executable, "-I", "-S", {fake!r}, str(port), "ready", run_dir]
processes.start(command, os.environ, "orphan", port, Path(run_dir) / "server.log", Path(run_dir))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A checkout with notebooks made by the test: `lab(name, *sources)` adds one."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(notebooks, "lab_root", lambda: tmp_path)

    def add(name, *sources, **about):
        cells = [new_code_cell('run_dir: str = "x"', metadata={"tags": ["parameters"]}), *map(new_code_cell, sources)]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        made = new_notebook(cells=cells, metadata={"kernelspec": kernel, "nvfp4lab": about})
        nbformat.write(made, tmp_path / "notebooks" / f"{name}.ipynb")
        return {"notebook": name, "parameters": {}, "cell_timeout_s": 60}

    return add


def of_this_test(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(process.info["cmdline"] or ())]


def test_servers_of_a_dead_kernel_are_ended(lab, tmp_path):
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    arguments = lab("50_orphan", textwrap.dedent(STARTS_A_SERVER_AND_DIES).format(fake=str(FAKE)))
    verdict, reason = notebooks.execute(arguments, attempt)
    assert verdict is Verdict.NOT_RUN, "killed from outside is not the notebook's failure"
    assert "SIGKILL" in reason
    assert '"launching"' in (attempt / "servers.jsonl").read_text()
    assert of_this_test(attempt) == []
    assert "SIGKILL" in (attempt / notebooks.REPORT_FILE).read_text()


def test_attempts_of_a_killed_run_are_set_aside_with_what_they_wrote(tmp_path):
    attempt = tmp_path / "pieces" / "0123456789abcdef.attempt-x"
    attempt.mkdir(parents=True)
    (attempt / "ledger.jsonl").write_text("kept\n")
    assert cleanup.clear_attempts(tmp_path) == []
    assert (tmp_path / "pieces" / "0123456789abcdef.lost-0" / "ledger.jsonl").read_text() == "kept\n"


def test_a_kernel_killed_from_outside_is_run_again_on_resume(lab, tmp_path):
    """Once killed, then sound: one result, exit code 2 and then 0; a kernel that dies by itself stays a failure."""
    source = "import os, signal\nfrom pathlib import Path\nflag = Path({!r})\n"
    source += "if not flag.exists():\n    flag.touch()\n    os.kill(os.getpid(), signal.{})"
    for signal_name, ends in (("SIGKILL", [2, 0]), ("SIGSEGV", [1, 1])):
        arguments = lab("53_killed", source.format(str(tmp_path / signal_name), signal_name))
        plan = Plan("killed", ((Piece(f"killed.{signal_name}", "nvfp4lab.batch.notebooks:execute", arguments),),))
        runs = [coordinator.run(plan, tmp_path / f"run-{signal_name}", InProcess()).exit_code for _ in range(2)]
        assert runs == ends, signal_name


def test_a_kernel_killed_while_it_starts_is_not_run(lab, tmp_path, monkeypatch):
    """Seen under SIGKILL at random moments: the kernel dies before its first word."""
    stillborn = mock.Mock(side_effect=RuntimeError("Kernel died before replying to kernel_info"))
    importlib.import_module("papermill")  # it loads our engine, which therefore cannot be imported first
    monkeypatch.setattr("nvfp4lab.batch.engine.LabNotebookClient.execute", stillborn)
    attempt = tmp_path / "0123.attempt-x"
    attempt.mkdir()
    verdict, reason = notebooks.execute(lab("54_stillborn", "1"), attempt)
    assert verdict is Verdict.NOT_RUN
    assert "did not start" in reason
    assert json.loads((attempt / notebooks.NOTEBOOK_FILE).read_text())["metadata"]["nvfp4lab_run"]["verdict"] == "not_run"


def test_what_ran_to_its_end_is_not_run_again_for_want_of_a_page(lab, tmp_path, monkeypatch):
    """Killed between the notebook's last cell and the piece's publication."""
    count = tmp_path / "count"
    arguments = lab("55_counted", f"from pathlib import Path\nwith Path({str(count)!r}).open('a') as file:\n    file.write('x')")
    lost, attempt = tmp_path / "pieces" / "0123.lost-0", tmp_path / "pieces" / "0123.attempt-x"
    lost.mkdir(parents=True)
    attempt.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("nvfp4lab.report.page.render", mock.Mock(side_effect=KeyboardInterrupt))
        notebooks.execute(arguments, lost)
    assert notebooks.execute(arguments, attempt) == (Verdict.OK, "")
    assert count.read_text() == "x"
    assert (attempt / notebooks.REPORT_FILE).exists()
    assert not lost.exists()


class InProcess:
    """The smallest executor: pieces one after the other, here."""

    def run(self, pieces, run_dir):
        """See `Executor.run`."""
        yield from (execute_piece(piece, run_dir) for piece in pieces)


def test_what_a_notebook_declares(lab):
    lab("51_needs", "1", after=["10_dispatch_routes"], gpus=2, timeout_s=7)
    about = notebooks.declared("51_needs")
    assert (about.after, about.gpus, about.timeout_s, about.parameters) == (("10_dispatch_routes",), 2, 7, {"run_dir"})
    assert about.resumes is False


@pytest.mark.parametrize("resumes", [True, False])
def test_a_notebook_that_resumes_finds_what_a_killed_attempt_had_measured(lab, tmp_path, resumes):
    lost, attempt = tmp_path / "pieces" / "0123.lost-0", tmp_path / "pieces" / "0123.attempt-x"
    (lost / "answers").mkdir(parents=True)
    (lost / "answers" / "a.json").write_text("[1]")
    (lost / "ledger.jsonl").write_text("kept\n")
    attempt.mkdir()
    arguments = lab(
        "52_resumes", "from pathlib import Path\nprint(sorted(p.name for p in Path(run_dir).iterdir()))", resumes=resumes
    )
    assert notebooks.execute(arguments, attempt)[0] is Verdict.OK
    assert (attempt / "ledger.jsonl").exists() is resumes
    assert (attempt / "answers" / "a.json").exists() is resumes


def test_reading_does_not_wait_for_the_memory_that_servers_want(tmp_path):
    """`--only 10` of a params file for a big host must run on a laptop."""
    path = COMMITTED[0].parents[1] / "params" / "qwen3_5_397b_nvfp4.yaml"
    needs = {piece.name.partition("_")[0]: piece.needs for piece in plan.of_params([path], [], tmp_path).pieces}
    assert {needs["10"].memory_gib, needs["40"].memory_gib} == {4.0}
    assert needs["31"].memory_gib == params.load(path).memory_gib == 64.0


def test_a_parameter_that_may_be_none_is_not_called_unknown(tmp_path):
    """Papermill's parser overlooks `str | None`, as in the first cell of notebook 40."""
    code = "from pathlib import Path; from nvfp4lab.batch import notebooks; print(notebooks.execute({arguments}, Path({folder!r})))"
    arguments = {
        "notebook": "40_decision",
        "parameters": {"flashinfer": "0.7.4", "runs": [str(tmp_path / "none")]},
        "cell_timeout_s": 60,
    }
    code = code.format(arguments=arguments, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(<Verdict")
    assert "unknown parameter" not in done.stderr + (tmp_path / "log.txt").read_text()


def test_an_unknown_notebook_names_its_nearest(lab):
    lab("31_server_matrix", "1")
    with pytest.raises(LabError, match="did you mean '31_server_matrix'"):
        notebooks.path_of("31_server_matrx")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebooks_keep_their_form(path):
    """A parameters cell of literals first, the check second, short code cells, no second way to name a parameter."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code[0]["metadata"].get("tags") == ["parameters"]
    assert "params.of_notebook(globals())" in "".join(code[1]["source"])
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert all(len("".join(cell["source"]).splitlines()) <= 14 for cell in code[1:]), "a code cell is longer than a reader wants"
    assert notebooks.declared(path.stem).parameters <= set(Params.model_fields)
