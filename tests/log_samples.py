# ruff: noqa: E501  (log lines stand as servers write them)
"""Realistic server logs for the classifier's tests: a healthy start as SGLang writes it, and ways for a line to stand in it."""

ARGUMENTS = (
    "server_args=ServerArgs(model_path='/models/smol-nvfp4', trust_remote_code=False, log_level='info', log_level_http='error', "
    "watchdog_timeout=300, soft_watchdog_timeout=None, enable_nan_detection=False, moe_runner_backend='{moe}', "
    "fp4_gemm_runner_backend='{gemm}', "
    "mem_fraction_static=0.83, disable_cuda_graph=False, crash_dump_folder=None, tp_size=2, quantization='modelopt_fp4', "
    "enable_memory_saver=False, debug_tensor_dump_inject=False, error_on_oom=False)"
)


def start(ranks: int = 2, moe: str = "auto", gemm: str = "auto", ready: bool = True) -> list[str]:
    """Lines of a start that works, up to the ready line, with what healthy logs hold that looks like trouble."""
    lines = [
        "/opt/venv/lib/python3.12/site-packages/torch/cuda/__init__.py:63: FutureWarning: The pynvml package is deprecated.",
        "  import pynvml  # type: ignore[import]",
        "[2026-11-29 12:00:01] Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchcodec'",
        "\x1b[33m[2026-11-29 12:00:02] WARNING server_args.py:1200: Attention backend not specified. Use fa3 backend by default.\x1b[0m",
        "[2026-11-29 12:00:02] " + ARGUMENTS.format(moe=moe, gemm=gemm),
        "[2026-11-29 12:00:03] Using default HuggingFace chat template with detected content format: string",
        "[2026-11-29 12:00:04] If no error follows within 300 s the watchdog timeout stays silent.",
    ]
    for rank in range(ranks):
        at = f"[2026-11-29 12:00:1{rank} TP{rank}]"
        lines += [
            f"{at} Init torch distributed begin.",
            f"{at} sglang is using nccl==2.28.9",
            f"{at} Init torch distributed ends. elapsed=1.52 s, mem usage=0.31 GB",
            f"{at} Load weight begin. avail mem=138.21 GB",
            f"{at} Detected nvfp4 checkpoint. Please note that the format is experimental and subject to change.",
        ]
    lines += [
        f"Loading safetensors checkpoint shards: {p:3d}% Completed | {p // 10}/10 [00:0{p // 20}<00:01,  9.12it/s]"
        for p in range(0, 101, 10)
    ]
    for rank in range(ranks):
        at = f"[2026-11-29 12:00:2{rank} TP{rank}]"
        lines += [
            f"{at} Load weight end. elapsed=4.02 s, type=LlamaForCausalLM, avail mem=120.00 GB, mem usage=18.2 GB.",
            f"{at} Using KV cache dtype: torch.bfloat16",
            f"{at} KV Cache is allocated. #tokens: 1283911, K size: 45.1 GB, V size: 45.1 GB",
            f"{at} Memory pool end. avail mem=27.33 GB",
            f"{at} Capture cuda graph begin. This can take up to several minutes. avail mem=26.93 GB",
        ]
    lines += [f"\rCapturing batches (bs={bs} avail_mem=26.8 GB): {bs}%|###   | [00:01<00:02]" for bs in (64, 32, 16, 8, 4, 2, 1)]
    for rank in range(ranks):
        at = f"[2026-11-29 12:00:3{rank} TP{rank}]"
        lines += [
            f"{at} Capture cuda graph end. Time elapsed: 3.11 s. mem usage=0.40 GB. avail mem=26.50 GB.",
            f"{at} max_total_num_tokens=1283911, chunked_prefill_size=8192, max_prefill_tokens=16384, context_len=8192",
        ]
    if ready:
        lines += [
            "[2026-11-29 12:00:40] INFO:     Started server process [4711]",
            "[2026-11-29 12:00:40] INFO:     Application startup complete.",
            "[2026-11-29 12:00:40] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
            "[2026-11-29 12:00:45] The server is fired up and ready to roll!",
        ]
    return lines


def traffic(requests: int = 60) -> list[str]:
    """Lines of a server at work, with users who ask about errors."""
    lines = []
    for index in range(requests):
        at = f"[2026-11-29 12:{1 + index // 60:02d}:{index % 60:02d}"
        lines += [
            f"{at} TP0] Prefill batch. #new-seq: 1, #new-token: {100 + index}, #cached-token: 0, token usage: 0.00, #running-req: {index % 8}",
            f"{at} TP0] Decode batch. #running-req: 8, #token: {900 + index}, token usage: 0.01, cuda graph: True, gen throughput (token/s): 812.{index:02d}",
            f'{at}] INFO:     127.0.0.1:5{index:04d} - "POST /generate HTTP/1.1" 200 OK',
        ]
    lines += [
        "[2026-11-29 12:03:00] Receive: obj=GenerateReqInput(rid='1', text='Why do I get RuntimeError: CUDA error: an illegal memory access was encountered, "
        "torch.OutOfMemoryError and NaN in the logits? !!!!!!!!!!!!!!!!!!!!!!!!')",
        "[2026-11-29 12:03:01] Finish: obj=GenerateReqInput(rid='1', text='Why ...'), out={'text': ' An illegal memory access means that CUDA error 700 "
        "was raised; a Traceback (most recent call last): shows the kernel.', 'meta_info': {'finish_reason': {'type': 'length'}}}",
        '[2026-11-29 12:03:02] INFO:     127.0.0.1:50001 - "POST /generate HTTP/1.1" 400 Bad Request',
        "[2026-11-29 12:03:02 TP0] max relative error of the fused kernel self-test: 0.0, 0 errors",
    ]
    return lines


FRAMES = (
    '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 2621, in run_scheduler_process',
    "    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, moe_ep_rank, pp_rank, dp_rank)",
    "                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/model_executor/model_runner.py", line 811, in forward',
    "    return self.forward_decode(forward_batch)",
)
AFTERMATH = (
    "",
    "[2026-11-29 12:05:00] Received sigquit from a child process. It usually means the child failed.",
    "[W1129 12:05:01.123456789 ProcessGroupNCCL.cpp:1497] Warning: WARNING: destroy_process_group() was not called before program exit",
    "Killed",
)


def crash(line: str, rank: int = 0) -> list[str]:
    """The tail of a log whose scheduler died with `line` as the exception."""
    head = f"[2026-11-29 12:04:59 TP{rank}] Scheduler hit an exception: Traceback (most recent call last):"
    known = ("Error", "Exception", "OutOfResources", "Unsupported")
    exception = line if ": " in line and line.split(": ")[0].endswith(known) else f"RuntimeError: {line}"
    if line.startswith("assert "):
        return [head, *FRAMES, "    " + line, "           ^^^^^^^^^^", "AssertionError", *AFTERMATH]
    return [head, *FRAMES, exception, *AFTERMATH]
