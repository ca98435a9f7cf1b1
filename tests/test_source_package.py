"""What the user names becomes a readable tree, or a message that says what was looked for and where."""

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import source_tree
from nvfp4lab.errors import LabError
from nvfp4lab.source import fetch
from nvfp4lab.source.package import resolve
from nvfp4lab.source.tree import MEMBER_LIMIT_BYTES, WheelTree


def wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def sglang_wheel(tmp_path, extra=None):
    metadata = {"sglang-0.0.test.dist-info/METADATA": "Name: sglang\nVersion: 0.0.test\n"}
    return wheel(tmp_path / "sglang-0.0.test-py3-none-any.whl", source_tree.MEMBERS | metadata | (extra or {}))


def test_wheel_folder_and_checkout_give_the_same_members(tmp_path):
    source_tree.write(tmp_path / "site")
    source_tree.write(tmp_path / "checkout" / "python")
    places = [sglang_wheel(tmp_path), tmp_path / "site", tmp_path / "site" / "sglang", tmp_path / "checkout"]
    packages = [resolve(place) for place in places]
    assert len({tuple(package.source_members()) for package in packages}) == 1
    assert {package.version for package in packages} == {"0.0.test"}
    assert len({package.tree.read("sglang/srt/server_args.py") for package in packages}) == 1


def test_members_that_leave_the_archive_do_not_exist(tmp_path):
    evil = {"../evil.py": "x", "/abs.py": "x", "sglang/../../evil2.py": "x", "C:/evil.py": "x", "sglang\\evil.py": "x"}
    tree = WheelTree(sglang_wheel(tmp_path, evil))
    assert not [name for name in tree.names() if "evil" in name or "abs" in name]
    assert "sglang/srt/server_args.py" in tree


def test_a_bomb_is_refused_by_its_size(tmp_path):
    path = sglang_wheel(tmp_path, {"sglang/srt/bomb.py": b"#" * (MEMBER_LIMIT_BYTES + 1)})
    assert path.stat().st_size < 1 << 20  # the bomb is small on disk
    with pytest.raises(LabError, match=r"bomb\.py unpacks to 32 MiB"):
        WheelTree(path).read("sglang/srt/bomb.py")


def test_a_damaged_member_is_not_believed(tmp_path):
    path = tmp_path / "sglang.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("sglang/srt/a.py", "value = 12345")
    path.write_bytes(path.read_bytes().replace(b"value = 12345", b"value = 54321"))
    with pytest.raises(LabError, match="is damaged"):
        WheelTree(path).read("sglang/srt/a.py")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder.mkdir(), "an empty folder: looked for"),
        (lambda folder: source_tree.write(folder, {"other/__init__.py": ""}), "no tree of sglang: looked for"),
        (lambda folder: source_tree.write(folder, {"sglang/__init__.py": ""}), "looked for sglang/srt/ among 1 members"),
    ],
)
def test_trees_that_are_not_sglang_say_what_was_looked_for(tmp_path, make, said):
    make(tmp_path / "tree")
    with pytest.raises(LabError, match=said):
        resolve(tmp_path / "tree")


@pytest.mark.parametrize("wanted", ["no/such/path", "latest", "../0.5"])
def test_what_is_neither_path_nor_version_is_said(wanted):
    with pytest.raises(LabError, match="not a version number such as"):
        resolve(wanted)


def test_a_file_that_is_no_wheel_is_said(tmp_path):
    path = tmp_path / "sglang.whl"
    path.write_text("not a zip")
    with pytest.raises(LabError, match="not a readable wheel"):
        resolve(path)


def test_links_do_not_lead_out_of_a_folder(tmp_path):
    root = source_tree.write(tmp_path / "site")
    (tmp_path / "secret.py").write_text("secret = 1")
    (root / "sglang" / "srt" / "secret.py").symlink_to(tmp_path / "secret.py")
    os.mkfifo(root / "sglang" / "srt" / "pipe.py")
    names = resolve(root).tree.names()
    assert "sglang/srt/secret.py" not in names
    assert "sglang/srt/pipe.py" not in names


def test_content_decides_the_digest_not_the_place(tmp_path):
    first, second = source_tree.write(tmp_path / "a"), source_tree.write(tmp_path / "b")
    assert resolve(first).tree.digest() == resolve(second).tree.digest()
    (second / "sglang/srt/utils/common.py").write_text("other = 1\n")
    assert resolve(first).tree.digest() != resolve(second).tree.digest()


class Pip:
    """Stands in for `pip download`: writes a wheel, or says what pip says."""

    def __init__(self, content=b"", stderr="", code=0):
        self.content, self.stderr, self.code, self.calls = content, stderr, code, 0

    def __call__(self, command, **_):
        self.calls += 1
        if self.content:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "sglang-9.9.9-py3-none-any.whl").write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_version_is_fetched_once_and_kept_by_its_hash(cache, monkeypatch, capsys):
    pip = Pip(content=b"wheel bytes")
    monkeypatch.setattr(subprocess, "run", pip)
    first = fetch.wheel("sglang", "9.9.9")
    assert fetch.wheel("sglang", "9.9.9") == first
    assert pip.calls == 1
    note = json.loads((cache / "wheels" / "sglang-9.9.9.json").read_text())
    assert first.parent.name == note["sha256"]
    assert capsys.readouterr().err.count("fetching sglang 9.9.9") == 1


def test_a_truncated_wheel_in_the_cache_is_fetched_again(cache, monkeypatch):
    pip = Pip(content=b"wheel bytes")
    monkeypatch.setattr(subprocess, "run", pip)
    fetch.wheel("sglang", "9.9.9").write_bytes(b"wheel")
    assert fetch.wheel("sglang", "9.9.9").read_bytes() == b"wheel bytes"
    assert pip.calls == 2


@pytest.mark.parametrize(
    ("stderr", "said", "code"),
    [
        (
            "ERROR: Could not find a version (from versions: 0.5.8, 9.9.7, 9.9.8)",
            "no such version on the package index; nearest: 9.9.7, 9.9.8",
            1,
        ),
        ("WARNING: Retrying: NewConnectionError(...)\nERROR: none (from versions: none)", "package index cannot be reached", 3),
        ("/usr/bin/python: No module named pip", "has no pip", 1),
        ("ERROR: disk quota exceeded", "ERROR: disk quota exceeded", 1),
    ],
)
def test_what_pip_says_becomes_what_to_do(cache, monkeypatch, stderr, said, code):
    monkeypatch.setattr(subprocess, "run", Pip(stderr=stderr, code=1))
    with pytest.raises(LabError, match=said) as raised:
        fetch.wheel("sglang", "9.9.9")
    assert raised.value.exit_code == code
