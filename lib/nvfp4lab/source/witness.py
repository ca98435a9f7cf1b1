"""A second, independent witness: SGLang's own objects, asked without a GPU, beside the reading of its source.

Needs SGLang installed; its version is what is asked, so compare with a router of the same version. The process that
imports it is another one (`witness_child`), under a faked capability and a stand-in for `sgl_kernel`.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError
from nvfp4lab.server import sgl_kernel_stand_in
from nvfp4lab.source.routes import Router
from nvfp4lab.source.routes_layers import quant_classes
from nvfp4lab.source.routes_query import Query, Route

_TIMEOUT_S = 600
_SMALL_MODEL_ARCHITECTURE = "Qwen3MoeForCausalLM"  # the child's config.json is one of these


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One backend, read and witnessed. agree: None where the witness could not say (a package or GPU is missing)."""

    backend: str
    read: str
    witnessed: str
    agree: bool | None


def installed_version() -> str | None:
    """Version of the SGLang that is installed here; None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def ask(router: Router, query: Query, backends: Iterable[str]) -> dict[str, Any]:
    """Answers of the installed SGLang by backend: `method` (quant method, runner, apply) and `arguments` (ServerArgs).

    Raises LabError when no SGLang is installed, another version than the router's, or the process fails.
    """
    installed = installed_version()
    if installed != router.reading.version:
        raise LabError(
            f"the witness needs sglang {router.reading.version} installed here; there is {installed or 'none'}", exit_code=3
        )
    classes = quant_classes(router.reading, query.quant)
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer.json"
        request = {
            "cc": query.capability,
            "a2a": query.a2a,
            "tp": query.tp,
            "ep": query.ep,
            "gated": query.gated,
            "quantization": query.quant if query.flag_given else None,
            "architecture": query.model_arch or _SMALL_MODEL_ARCHITECTURE,
            "config_class": classes.config.dotted,
            "method_class": classes.moe.dotted,
            "backends": list(backends),
            "answer_file": str(answer_file),
        }
        done = _run(request)
        if not answer_file.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LabError(f"the witness process ended with code {done.returncode} before it answered: {last}", exit_code=3)
        return json.loads(answer_file.read_text(encoding="utf-8"))


def _run(request: Mapping[str, Any]) -> subprocess.CompletedProcess:
    stand_in = str(Path(sgl_kernel_stand_in.__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([stand_in, os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        return subprocess.run(
            [sys.executable, "-m", "nvfp4lab.source.witness_child"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"the witness process gave no answer within {_TIMEOUT_S} s", exit_code=3) from error


def compare(routes: Iterable[Route], answers: Mapping[str, Any]) -> list[Comparison]:
    """Readings beside answers. Of several routes of `auto`, the last counts: the one that no model's rule changes.

    A reading agrees with a refusal when it raises at the same file and line. It agrees with going on when it does not
    raise inside SGLang and names the runner and the fused function that were built.
    """
    last = {route.backend: route for route in routes if route.op == "moe"}
    return [_compare(route, answers[backend]) for backend, route in last.items() if backend in answers]


def _compare(route: Route, answer: Mapping[str, Any]) -> Comparison:
    refused = next((part for part in (answer["arguments"], answer["method"]) if part["outcome"] == "refused"), None)
    if refused is not None:
        said = f"{refused['error']} at {refused['file']}:{refused['line']}"
        agree = None if route.expected.startswith("depends") else _is_at(route, refused)
        return Comparison(route.backend, _read(route), said, agree)
    method = answer["method"]
    if method["outcome"] == "stopped":
        return Comparison(route.backend, _read(route), f"stopped: {method['error']}: {method['said']}", None)
    said = f"runner {method['runner']}, fused function {method['fused']}"
    whys = " ".join(hop.why for hop in route.hops)
    built = f"builds a MoeRunner for {method['runner']}" in whys or method["runner"] is None
    fused = method["fused"] is None or f"fused function {method['fused']} " in whys
    return Comparison(route.backend, _read(route), said, built and fused and not _raises_in_sglang(route))


def _is_at(route: Route, refused: Mapping[str, Any]) -> bool | None:
    """Whether the reading has this refusal: as its proven raise, or as a check that it left open (None: no contradiction)."""
    lines = range(
        refused["line"] - 12, refused["line"] + 1
    )  # a traceback names the message's line, a reading the statement's first
    if _raises_in_sglang(route) and any(hop.file == refused["file"] and hop.line in lines for hop in route.hops[-1:]):
        return True
    if _raises_in_sglang(route):
        return None  # both refuse, each at the first check that it came to
    open_checks = [gate for gate in route.gates if gate.state == "depends" and gate.file == refused["file"] and gate.line in lines]
    return None if open_checks else False


def _raises_in_sglang(route: Route) -> bool:
    return route.raises and route.final_call.startswith("none")


def _read(route: Route) -> str:
    if not _raises_in_sglang(route):
        return f"goes on to {route.final_call}"
    last = route.hops[-1]
    return f"{route.expected} ({last.file}:{last.line})"


def report(router: Router, query: Query, routes: Iterable[Route], wanted: bool) -> str:
    """The comparison as Markdown, or why there is none."""
    if not wanted:
        return "The witness was not asked; `witness = True` asks the installed SGLang (half a minute)."
    routes = [route for route in routes if route.op == "moe"]
    members = router.reading.vocabulary.enums["moe_runner"].members.values()
    backends = dict.fromkeys(route.backend for route in routes if route.backend in members)
    try:
        return markdown(compare(routes, ask(router, query, backends)))
    except LabError as error:
        return f"The witness could not be asked: {error}"


def markdown(rows: Iterable[Comparison]) -> str:
    """Disagreements first."""
    words = {False: "**disagree**", None: "not decided", True: "agree"}
    ordered = sorted(rows, key=lambda row: (row.agree is not False, row.agree is not None))
    lines = ["| flag value | | read from source | said by SGLang itself |", "|---|---|---|---|"]
    lines += [f"| `{row.backend}` | {words[row.agree]} | {_cell(row.read)} | {_cell(row.witnessed)} |" for row in ordered]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
