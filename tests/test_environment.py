"""One list of packages, in two files; and the names in documents are real."""

import subprocess
import tomllib

import yaml

from nvfp4lab.bundle import recipe

EXTRAS = ("serve-cpu", "ray", "slurm", "dev")


def test_conda_and_pip_install_the_same(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [pin for extra in EXTRAS for pin in project["optional-dependencies"][extra]]
    conda = yaml.safe_load((root / "environment.yml").read_text())["dependencies"]
    assert conda[-1]["pip"] == wanted


def test_make_installs_those_extras_and_the_sglang_that_the_conda_file_names(root):
    makefile = (root / "Makefile").read_text()
    assert f"'.[{','.join(EXTRAS)}]'" in makefile
    version = makefile.split("SGLANG_CPU :=")[1].split()[0]
    assert f"sglang=={version}" in (root / "environment.yml").read_text()


def test_a_gpu_host_gets_the_timer_that_a_bundle_carries(root):
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    carried = recipe.load().alone
    assert {"cupti-python", "pyelftools"} <= set(extra) & set(carried)


def test_ci_calls_make_test_and_nothing_else_tests(root):
    assert "\nmake test\n" in (root / ".ci" / "run").read_text()
    assert "pytest" in subprocess.run(["make", "-n", "test"], cwd=root, capture_output=True, text=True, check=True).stdout


def test_notebooks_are_committed_without_outputs(root):
    tracked = subprocess.run(["git", "ls-files", "notebooks"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    assert tracked
    for name in tracked:
        assert '"output_type"' not in (root / name).read_text(), f"{name} is committed with outputs"
