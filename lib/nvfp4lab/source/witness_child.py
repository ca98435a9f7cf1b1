"""The process that imports the installed SGLang under a faked capability and asks its own objects. Run by `witness`.

Reads one JSON request from standard input, writes one JSON answer to the file it names. Nothing here runs a kernel: weights
and layers are stand-ins, so what is asked is only which way SGLang's Python goes and what it refuses.
"""

import importlib
import json
import linecache
import sys
import tempfile
import traceback
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fake_gpu(major: int, minor: int) -> None:
    """Make torch report one GPU of that capability; must run before SGLang is imported."""
    import torch

    properties = types.SimpleNamespace(major=major, minor=minor, name="faked", total_memory=96 << 30, multi_processor_count=188)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "get_device_name": "faked",
        "mem_get_info": (90 << 30, 96 << 30),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)


def answer(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a call says, or how it refuses: the exception with the file and line of its `raise` or `assert`.

    `stopped`: something else failed, such as a stand-in tensor or a package that is not installed; that proves nothing.
    """
    try:
        return {"outcome": "went on"} | call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        source = linecache.getline(last.filename, last.lineno).strip()
        refused = source.startswith(("raise", "assert")) and not isinstance(error, ImportError)
        file = last.filename.replace("\\", "/").partition("site-packages/")[2] or last.filename
        said = " ".join(str(error).split())[:300]
        return {
            "outcome": "refused" if refused else "stopped",
            "error": type(error).__name__,
            "said": said,
            "file": file,
            "line": last.lineno,
        }


def set_backends(runner: str, a2a: str) -> None:
    """Replace SGLang's getters in every module that imported them."""
    utils = importlib.import_module("sglang.srt.layers.moe.utils")
    getters = {
        "get_moe_runner_backend": lambda: utils.MoeRunnerBackend(runner),
        "get_moe_a2a_backend": lambda: utils.MoeA2ABackend(a2a),
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang") and module is not None]:
        for name, getter in getters.items():
            if name in vars(module):
                setattr(module, name, getter)


def ask_moe(request: dict[str, Any], backend: str) -> dict[str, Any]:
    """Build the quant method and its runner, then the first `apply` up to the runner."""
    from sglang.srt.layers.moe import MoeRunnerConfig

    set_backends(backend, request["a2a"])
    config_class, method_class = (_class(request[name]) for name in ("config_class", "method_class"))
    algorithm = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    method = method_class(config_class.from_config({"quantization": algorithm}))
    layer = unittest.mock.MagicMock(_mega_moe_nvfp4=False, _cutedsl_scales=(1, 2, 3), _cutlass_swiglu_params=(None, None, None))
    sizes = {"num_experts": 8, "num_local_experts": 8, "hidden_size": 256, "intermediate_size_per_partition": 256, "top_k": 2}
    method.create_moe_runner(layer, MoeRunnerConfig(activation="silu", is_gated=request["gated"], **sizes))
    runner = getattr(method, "runner", None)
    said: dict[str, Any] = {"runner": None, "fused": None}
    if runner is not None:
        said = {"runner": runner.runner_backend.value, "fused": getattr(runner.fused_func, "__name__", None)}
        runner.run = lambda *args, **kwargs: said.update(ran=True)
    method.apply(layer, unittest.mock.MagicMock())
    return said


def ask_arguments(request: dict[str, Any], backend: str, quantization: str | None) -> dict[str, Any]:
    """Resolve the server's arguments for a small MoE of the asked architecture; what `auto` became."""
    from sglang.srt.server_args import ServerArgs

    flags = {"moe_runner_backend": backend, "moe_a2a_backend": request["a2a"], "quantization": quantization}
    layout = {"tp_size": request["tp"], "ep_size": request["ep"], "device": "cuda", "skip_tokenizer_init": True}
    arguments = ServerArgs(model_path=request["model"], **flags, **layout)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
        from sglang.srt.arg_groups.overrides import resolved_view

        arguments = resolved_view(arguments)
    return {"resolved": arguments.moe_runner_backend}


def _class(dotted: str) -> type:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def small_model(folder: Path, architecture: str) -> str:
    """A config.json of an NVFP4 MoE, enough for the argument rules; there are no weights."""
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    config = {
        "architectures": [architecture],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def main() -> int:
    request = json.load(sys.stdin)
    fake_gpu(*request["cc"])
    with tempfile.TemporaryDirectory() as folder:
        request["model"] = small_model(Path(folder), request["architecture"])
        answers = {}
        for backend in request["backends"]:
            arguments = answer(lambda backend=backend: ask_arguments(request, backend, request["quantization"]))
            resolved = arguments.get("resolved", backend)
            answers[backend] = {"arguments": arguments, "method": answer(lambda backend=resolved: ask_moe(request, backend))}
    Path(request["answer_file"]).write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
