"""Twenty hostile inputs: each is a clear error, none runs, loads, escapes or fills anything."""

import io
import json
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from nvfp4lab import params
from nvfp4lab.batch.unpack import extract
from nvfp4lab.decide.gather import recorded
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4.audit import audit
from nvfp4lab.source import package


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return path


YAML = {
    "a tag that calls a function": "sglang: !!python/object/apply:os.system ['touch {marker}']",
    "a tag that builds an object": "sglang: !!python/object:subprocess.Popen {}",
    "a tag that imports a module": "sglang: !!python/module:antigravity",
    "a custom tag": "sglang: !include /etc/passwd",
    "a run folder that climbs out": "run_dir: outputs/../../elsewhere",
    "joined runs that climb out": "runs: ['../secret']",
    "a notebook that is a path": "notebooks: ['../../etc/passwd']",
    "an arm name that is a path": "arms: [{name: '../../x'}]",
    "a version with a shell in it": "sglang: '0.5.9; touch {marker}'",
    "a whole document that is a list": "- sglang",
}


@pytest.mark.parametrize("what", YAML)
def test_yaml(tmp_path, what):
    marker = tmp_path / "marker"
    with pytest.raises(params.ParamsError) as error:
        params.load(yaml_file(tmp_path, YAML[what].replace("{marker}", str(marker))))
    assert str(tmp_path / "p.yaml") in str(error.value)
    assert not marker.exists()


def archive(name: str, content: bytes = b"x", mode: int = 0o644) -> zipfile.ZipFile:
    """A zip with one member of any name and mode."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        made.writestr(info, content, zipfile.ZIP_DEFLATED)
    return zipfile.ZipFile(buffer)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (archive("../evil"), "leave its folder"),
        (archive("/etc/evil"), "leave its folder"),
        (archive("a/../../evil"), "leave its folder"),
        (archive("link", b"/etc/passwd", stat.S_IFLNK | 0o777), "leave its folder"),
        (archive("bomb", b"\0" * 2_000_000), "more than"),
    ],
    ids=["parent", "absolute", "climbing", "link", "bomb"],
)
def test_a_result_sent_by_another_host(tmp_path, member, said):
    with pytest.raises(LabError, match=said):
        extract(member, tmp_path / "piece", max_bytes=1_000_000)
    assert not list(tmp_path.rglob("evil"))


def test_a_bomb_that_calls_itself_a_wheel(tmp_path):
    wheel = tmp_path / "sglang-0.5.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("sglang/srt/server_args.py", b"# " + b"\0" * 300_000_000)
    with pytest.raises(LabError):
        package.resolve(wheel).tree.read("sglang/srt/server_args.py")


def checkpoint(tmp_path: Path, header: bytes) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(header)
    return folder


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 9) + b"{not json",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10_000) + b"{",
    ],
    ids=["a header larger than the file", "no JSON", "a list", "cut off"],
)
def test_a_malformed_safetensors_header_is_a_finding(tmp_path, header):
    findings = audit(checkpoint(tmp_path, header)).findings
    assert findings
    assert all(finding.fix for finding in findings)


def test_a_pickle_is_no_checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(LabError, match="safetensors"):
        audit(folder)


def test_a_ledger_of_something_else_yields_no_evidence(tmp_path):
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"verdict": "ok"}) + "\n[1, 2]\n\x00\x01\n")
    assert recorded(tmp_path) == []
