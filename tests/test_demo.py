"""The main job, for real: what `make demo` runs, and the pages that a person opens afterwards."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from browser import visit
from nvfp4lab.records import Ledger, Stack, Verdict
from nvfp4lab.report.page import MAX_PAGE_BYTES


@pytest.fixture(scope="module")
def demo(root, tmp_path_factory) -> Path:
    """The run folder of the CPU demo."""
    commands = subprocess.run(["make", "-n", "demo"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any(command.endswith("nvfp4lab run params/cpu_demo.yaml") for command in commands)
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4lab", "run", "params/cpu_demo.yaml", "--out", run_dir],
        cwd=root,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"report: {run_dir / 'index.html'}" in done.stdout
    return run_dir


@pytest.mark.server
@pytest.mark.wheel
@pytest.mark.timeout(900)
class TestDemo:
    def test_every_stage_left_evidence_and_the_servers_are_right(self, demo):
        records = list(Ledger(demo / "ledger.jsonl"))
        assert {"source", "server", "load"} <= {record.stage for record in records}
        servers = [record for record in records if record.stage == "server"]
        assert len(servers) >= 2
        assert {record.verdict for record in servers} == {Verdict.OK}
        loads = [record for record in records if record.stage == "load"]
        assert len({record.subject for record in loads}) == 2 and {record.verdict for record in loads} == {Verdict.OK}
        assert all(record.number("output_tok_s").value > 0 for record in loads)
        assert all(record.repro for record in records)
        assert all(record.stack != Stack() for record in records), "a verdict without the stack it holds for"
        assert all(record.stack.sglang and record.stack.torch and record.stack.machine for record in servers)

    def test_sglangs_benchmark_drove_every_arm_under_canaries(self, demo):
        rows = [json.loads(path.read_text()) for path in demo.glob("pieces/*/load/*.json")]
        assert sorted(row["run"]["concurrency"] for row in rows) == [1, 1, 4, 4]
        for row in rows:
            assert row["void"] is None and row["canary_checks"] >= 1
            requests, duration_s = row["run"]["requests"], row["run"]["duration_s"]
            assert len(requests) == 2 * row["run"]["concurrency"]
            assert all(0 < one["ttft_s"] < one["latency_s"] <= duration_s and one["output_tokens"] == 8 for one in requests)
        speeds = [record.number("output_tok_s").value for record in Ledger(demo / "ledger.jsonl") if record.stage == "load"]
        measured = [8 * len(row["run"]["requests"]) / row["run"]["duration_s"] for row in rows]
        assert sorted(speeds) == pytest.approx(sorted(measured))

    def test_every_file_it_promises_is_there(self, demo):
        names = [row["name"] for row in json.loads((demo / "plan.json").read_text())["pieces"]]
        assert [name.split(".")[0][:2] for name in names] == ["00", "10", "20", "30", "31", "32", "40"]
        for name in names:
            assert (demo / f"{name}.html").exists()
            assert (demo / f"{name}.ipynb").exists()

    @pytest.mark.browser
    def test_pages_open_offline_with_their_pictures(self, demo, chromium):
        for path in sorted(demo.glob("*.html")):
            seen = visit(chromium, path)
            assert seen.requests == (), path
            assert seen.console == (), path
            assert path.stat().st_size <= MAX_PAGE_BYTES, path
            pictures = re.findall(r"<img [^>]*>", seen.dom)
            assert all('src="data:image/png;base64,' in picture and 'alt="' in picture for picture in pictures), path
            assert pictures or path.name == "index.html", path
            assert "No description has been provided" not in seen.dom, path

    def test_nothing_names_this_machine_or_a_secret(self, demo):
        for path in demo.rglob("*.html"):
            assert "[redacted]" not in path.read_text(), f"{path}: something looked like a secret"
