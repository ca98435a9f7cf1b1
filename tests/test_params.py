"""A params file or parameter that cannot be used says which file, which key and what was meant; nothing runs."""

import subprocess
import sys

import pytest

from nvfp4lab import params


def write(tmp_path, text, name="some.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_all_committed_files_load(root):
    files = sorted((root / "params").glob("*.yaml"))
    assert files
    for path in files:
        params.load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sglanf: '0.5.9'", ["sglanf", "did you mean 'sglang'"]),
        ("tp: two", ["tp", "integer", "'two'"]),
        ("tp: 0", ["tp", "greater than or equal to 1"]),
        ("cc: twelve", ["cc", "twelve"]),
        ("sglang: !!python/object/apply:os.system ['true']", ["tags are refused"]),
        ("- a list", ["name: value", "list"]),
        ("notebooks: [31_server_matrix, nonsense]", ["notebooks.1"]),
        ("a: [1, 2", ["not plain YAML"]),
    ],
)
def test_bad_files_are_explained(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(params.ParamsError) as error:
        params.load(path)
    for part in [str(path), *expected]:
        assert part in str(error.value)


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    write(tmp_path, "tp: 1", "h200.yaml")
    with pytest.raises(params.ParamsError, match=r"h20\.yaml.*did you mean.*h200\.yaml"):
        params.load(tmp_path / "h20.yaml")


def test_a_number_for_a_capability_is_taken_as_it_is_meant(tmp_path):
    assert params.load(write(tmp_path, "cc: 12.0")).cc == "12.0"


def test_notebook_parameters_are_checked_and_typed():
    namespace = {"cc": "9.0", "tp": 2, "__name__": "x", "_hidden": 1, "params": params, "In": [], "Out": {}}
    values = params.of_notebook(namespace)
    assert (values.cc, values.tp) == ("9.0", 2)
    with pytest.raises(params.ParamsError, match="did you mean 'tp'"):
        params.of_notebook(namespace | {"tpp": 2})


def test_a_typo_in_plain_papermill_fails_the_notebook(root, tmp_path):
    command = [sys.executable, "-m", "papermill", "notebooks/00_start_here.ipynb", tmp_path / "out.ipynb", "--no-progress-bar"]
    done = subprocess.run([*map(str, command), "-p", "run_dri", str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode != 0
    assert "did you mean 'run_dir'" in done.stderr
