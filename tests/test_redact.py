"""Forty planted secrets of ten kinds are gone from every kind of text; ordinary text stays as it was."""

import json

import pytest

from nvfp4lab.report.redact import MARK, redact, redact_data, redact_files

X = "Zq7Rk2Lm9Tb4Xw8Yc3Vd6"
SECRETS = {
    "environment": [f"HF_TOKEN={X}", f"export AWS_SECRET_ACCESS_KEY={X}", f"WANDB_API_KEY={X}", f"DB_PASSWORD='{X}'"],
    "flag": [f"--api-key {X}", f"--hf-token={X}", f"--admin-password {X}", f"--client-secret={X}"],
    "json": [f'{{"api_key": "{X}"}}', f"{{'password': '{X}'}}", f'{{"access_token":"{X}"}}', f'{{\\"secret\\": \\"{X}\\"}}'],
    "header": [f"Authorization: Bearer {X}", f"authorization: Basic {X}=", f"'Authorization': 'Bearer {X}'", f"sent bearer {X}"],
    "url": [f"https://user:{X}@host/x", f"postgres://me:{X}@db:5432/a", f"git+https://{X}@forge/x", f"http://a:{X}@127.0.0.1/"],
    "hugging_face": [f"hf_{X}", f"login with hf_{X}.", f"('hf_{X}',)", f"x=hf_{X}&y=1"],
    "openai_github": [f"sk-{X}", f"ghp_{X}{X}", f"github_pat_{X}{X}", f"sk-proj-{X}"],
    "cloud": ["AKIAIOSFODNN7EXAMPLE", f"AIza{X}{X[:14]}", f"xoxb-{X}", f"nvapi-{X}"],
    "jwt": [f"eyJ{X}.eyJ{X}.{X}", f"cookie=eyJ{X}.eyJ{X}.{X};", f"[eyJ{X}.eyJ{X}.{X}]", f"jwt eyJ{X}.eyJ{X}.{X} end"],
    "key_block": [
        f"-----BEGIN {kind} PRIVATE KEY-----\n{X}\n-----END {kind} PRIVATE KEY-----" for kind in ("RSA", "EC", "OPENSSH", "DSA")
    ],
}
PLAIN = [
    "ServerArgs(max_total_tokens=2048, api_key=None, hf_token=None)",
    "bos_token: '<s>', eos_token_id=2, pad_token='<pad>'",
    "first token: 350 ms, output tokens: 1229",
    "the next token was generated after the key was read",
    "--max-total-tokens 2048 --tokenizer-path /models/x",
    "https://github.com/sgl-project/sglang/issues/36599",
    "KeyError: 'model.layers.0.mlp.experts.w13_weight_scale'",
    "sha256 5f2b7a9c0d1e",
    "PWD=/srv/lab OLDPWD=/srv",
]


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_gone(kind):
    assert len(SECRETS[kind]) == 4
    for text in SECRETS[kind]:
        clean = redact(f"before {text} after")
        assert X not in clean, clean
        assert "AKIAIOSFODNN7" not in clean
        assert MARK in clean
        assert clean.startswith("before ")
        assert clean.endswith("after") or kind == "key_block"


@pytest.mark.parametrize("text", PLAIN)
def test_ordinary_text_stays(text):
    assert redact(text) == text


def test_values_of_secret_environment_variables_are_gone_wherever_they_appear(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    assert redact("curl said correct-horse-battery") == f"curl said {MARK}"


def test_the_working_directory_is_no_password(monkeypatch):
    monkeypatch.setenv("PWD", "/srv/lab")
    assert redact("/srv/lab/outputs") == "/srv/lab/outputs"


def test_data_keeps_its_shape():
    data = {"command": ["sglang", "--api-key", "x"], "password": "short", "n": 3, "image/png": "hf_" + "a" * 30}
    assert redact_data(data) == data | {"password": MARK}


def test_files_of_other_programs_are_cleaned_in_place(tmp_path):
    log = tmp_path / "server" / "log.txt"
    log.parent.mkdir()
    log.write_bytes(b"\xff ok\r\nHF_TOKEN=" + X.encode() + b"\r\nend")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"env": {"HF_TOKEN": X}}) + "\n" + json.dumps({"a": 1}) + "\n")
    clean = tmp_path / "clean.txt"
    clean.write_text("nothing here")
    assert redact_files(tmp_path) == [rows, log]
    assert log.read_bytes() == b"\xff ok\r\nHF_TOKEN=[redacted]\r\nend"
    assert [json.loads(line) for line in rows.read_text().splitlines()] == [{"env": {"HF_TOKEN": MARK}}, {"a": 1}]
