"""Wrong input on the command line: one line that says what was wrong and what to do, never a traceback, never a silent success."""

import signal
from pathlib import Path

import pytest

from nvfp4lab import cli
from nvfp4lab.batch import cleanup, executors
from nvfp4lab.errors import LabError
from nvfp4lab.server.processes import Started


def said(capsys, *command: object) -> str:
    """What the command complains about in one line; its exit code is not 0."""
    assert cli.main([str(word) for word in command]) != 0
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def start_here(tmp_path: Path) -> Path:
    """A params file with one quick notebook."""
    path = tmp_path / "one" / "same.yaml"
    path.parent.mkdir()
    path.write_text("notebooks: [00_start_here]\n")
    return path


def test_a_run_folder_that_is_a_file(start_here, capsys):
    line = said(capsys, "run", start_here, "--out", start_here)
    assert str(start_here) in line
    assert "--out" in line


def test_a_run_leaves_the_signals_of_its_process_as_they_were(start_here):
    before = signal.getsignal(signal.SIGTERM)
    cli.main(["run", str(start_here), "--out", str(start_here)])
    assert signal.getsignal(signal.SIGTERM) is before


def test_params_files_of_one_name_would_overwrite_each_others_pages(start_here, tmp_path, capsys):
    other = tmp_path / "same.yaml"
    other.write_text("notebooks: [00_start_here]\ncc: '9.0'\n")
    line = said(capsys, "run", start_here, other, "--out", tmp_path / "run")
    assert "'same'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, -1])
def test_a_run_without_workers_would_never_end(workers):
    with pytest.raises(LabError, match="at least 1"):
        executors.create("local", workers=workers)


def test_slurm_where_there_is_none(start_here, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "login node" in said(capsys, "run", start_here, "--out", tmp_path / "run", "--executor", "slurm")


def test_an_error_of_the_file_system_names_the_file(tmp_path, capsys, monkeypatch):
    where = tmp_path / "no folder" / "routes.json"
    monkeypatch.setattr("nvfp4lab.commands.index.run", lambda args: where.write_text(""))
    line = said(capsys, "index", tmp_path)
    assert str(where) in line
    assert "No such file" in line


def test_a_folder_without_runs_gets_no_index(tmp_path, capsys):
    assert "no run" in said(capsys, "index", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_our_own_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(args):
        raise ConnectionResetError("not about a file")

    monkeypatch.setattr("nvfp4lab.commands.index.run", broken)
    with pytest.raises(ConnectionResetError):
        cli.main(["index", str(tmp_path)])


@pytest.mark.parametrize("command", ["decide", "diff"])
def test_a_file_without_one_record_is_no_ledger(tmp_path, capsys, command):
    (tmp_path / "notes.md").write_text("# notes\n")
    line = said(capsys, command, *[tmp_path / "notes.md"] * (2 if command == "diff" else 1))
    assert "no ledger" in line


def test_a_topic_that_does_not_exist_is_not_called_unchanged(capsys):
    with pytest.raises(SystemExit):
        cli.main(["changes", "--sglang", "0.5.17", "0.5.23", "--topic", "rotues"])
    assert "auto" in capsys.readouterr().err


def test_an_exit_state_that_does_not_exist(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["classify", str(tmp_path), "--exit", "dead"])
    complaint = capsys.readouterr().err
    assert "'dead'" in complaint
    assert "timeout" in complaint.splitlines()[-1]
    assert "_exit_state" not in complaint


def test_a_filter_that_matches_no_case(capsys):
    line = said(capsys, "kernels", "--list", "--only", "emulatoin")
    assert "emulatoin" in line
    assert "--list" in line


def test_an_ended_server_is_told_in_words(tmp_path, monkeypatch):
    left = Started("bf16", "marker", 29035, None, tmp_path)
    monkeypatch.setattr(cleanup.processes, "leftovers", lambda folder: [left])
    monkeypatch.setattr(cleanup.processes, "end", lambda server: None)
    assert cleanup.end_servers_of(tmp_path) == [
        "ended the server of arm bf16 on port 29035, left behind when its notebook was stopped"
    ]


def test_a_wrong_value_is_told_with_what_it_means(tmp_path, capsys):
    (tmp_path / "p.yaml").write_text("cc: twelve\n")
    assert "compute capability" in said(capsys, "run", tmp_path / "p.yaml")
