# ruff: noqa: E501  (log lines stand as servers write them)
"""The log classifier: every reported line inside a realistic log, other lines of the same kinds, and logs that must not be misread."""

import gzip
import io
import json
import random
import time

import pytest

import log_samples
from nvfp4lab import cli
from nvfp4lab.records import Verdict
from nvfp4lab.server import logs, logs_signatures

REPORTS = [report for report in logs_signatures.reports().values() if report.literal]
NOTICES = {signature.id for signature in logs_signatures.load() if signature.rank == "notice"}


def classify(lines: list[str], exit_state: logs.Exit = None) -> logs.Classification:
    return logs.classify(io.BytesIO("\n".join(lines).encode()), exit_state)


def classes_of(literal: str) -> set[str]:
    return {report.symptom_class for report in REPORTS if report.literal == literal}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.id)
@pytest.mark.parametrize("build", ["exception_at_start", "exception_under_load", "plain_then_death", "last_line", "before_traffic"])
def test_every_reported_line_is_recognised(report, build):
    """Class, decisive line, its number and the report itself, wherever the line stands."""
    healthy = log_samples.start() + log_samples.traffic()
    stamped = f"[2026-11-29 12:00:39 TP1] {report.literal}"
    lines = {
        "exception_at_start": log_samples.start(ready=False) + log_samples.crash(report.literal),
        "exception_under_load": healthy + log_samples.crash(report.literal, rank=1),
        "plain_then_death": [*log_samples.start(ready=False), stamped, *log_samples.AFTERMATH],
        "last_line": [*healthy, report.literal],
        "before_traffic": [*log_samples.start(ready=False), stamped, *log_samples.start()[-4:], *log_samples.traffic()],
    }[build]
    answer = classify(lines)
    assert answer.symptom_class in classes_of(report.literal)
    assert report.id in answer.reports[: len(classes_of(report.literal)) + 1]
    assert report.literal in logs_signatures.normal_quotes(answer.line)
    assert answer.line.strip() == lines[answer.line_number - 1].strip()


OTHERS = {
    "oom": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 94.97 GiB of which 1.1 GiB is free.",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "ValueError: max_total_num_tokens=0. The memory pool is too small: increase --mem-fraction-static.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [b12x] workspace allocation of 3221225472 bytes failed: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "ValueError: Loaded weights leave no GPU memory for the KV cache. Please try to increase --mem-fraction-static.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9437184 bytes.",
    ],
    "hang": [
        "[rank1]:[E1129 12:04:59.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=14, OpType=ALLREDUCE)",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "[2026-11-29 12:04:59 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        "[2026-11-29 12:04:59 TP0] Watchdog timeout (self.watchdog_timeout=300)",
        "TimeoutError: Server did not become ready in 600 seconds",
        "RuntimeError: Rank 2 initialization timed out after 600 seconds",
        "[rank1]:[F1129 13:10:02 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId: wait timeout after 600000ms",
    ],
    "crash_at_runtime": [
        "RuntimeError: CUDA error: misaligned address",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "[ 7312.2] NVRM: Xid (PCI:0000:41:00): 13, pid=4711, name=python3, Graphics Exception: Shader Program Header 18 Error",
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes may help.",
        "RuntimeError: [FP8 gemm Runner] Failed to run cutlass FP8 gemm on sm120. Error: Error Internal",
        "RuntimeError: cutlass_moe_mm: CUTLASS_CHECK failed: Error Internal",
    ],
    "crash_at_import": [
        "ImportError: /opt/site/sgl_kernel/sm100/common_ops.abi3.so: undefined symbol: _ZN2at4_ops5zeros4callEv",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "ModuleNotFoundError: No module named 'flashinfer'",
        "ModuleNotFoundError: No module named 'sgl_kernel.infllm_v2'",
        "RuntimeError: flashinfer-cubin version (0.6.3) does not match flashinfer version (0.6.15.post1). Please install the same version.",
        "ImportError: cannot import name 'nvfp4_quantize' from 'flashinfer' (/opt/site/flashinfer/__init__.py)",
        "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /opt/site/sgl_kernel/common_ops.so)",
        "ValueError: 'qwen3_asr' is already used by a Transformers config, pick another name.",
    ],
    "crash_at_capture": [
        "Exception: Capture cuda graph failed: flux capacitor",
        "RuntimeError: CUDA error: operation not permitted when stream is capturing",
        "RuntimeError: CUDA error: operation failed due to a previous error during capture",
        "torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped",
        "RuntimeError: Cannot call cudaMalloc during CUDA graph capture",
    ],
    "checkpoint_layout": [
        "AssertionError: param.size()=torch.Size([256, 1024]), loaded_weight.size()=torch.Size([256, 512])",
        "ValueError: Tried to load weights of size torch.Size([1024, 8192])to a parameter of size torch.Size([1024, 4096])",
        "RuntimeError: The size of tensor a (3072) must match the size of tensor b (1536) at non-singleton dimension 1",
        "KeyError: 'model.layers.3.mlp.experts.w13_weight_scale_2'",
        "ValueError: Unrecognized weight name: model.layers.3.mlp.experts.0.gate_proj.weight_scale_2",
        "assert param.data.shape == loaded_weight.shape, (param.data.shape, loaded_weight.shape)",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "ValueError: Weight input_size_per_partition = 288 is not divisible by min_thread_k = 128.",
        "RuntimeError: size_n = 160 is not divisible by tile_n_size = 64",
        "ValueError: Intermediate size 160 per partition must be a multiple of 64 for Marlin",
        "AssertionError: Tried to load weight of size torch.Size([4096, 3584]) to a parameter of size torch.Size([4096, 7168])",
    ],
    "crash_at_load": [
        "AttributeError: 'NoneType' object has no attribute 'group_size'",
        "ValueError: Mismatched w2_sf.shape[1] on argument #11 when calling: `run(...)`, expected to be 4",
        "RuntimeError: The size of tensor a (512) must match the size of tensor b (64) at non-singleton dimension 0",
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys([])",
        "OSError: Can't load the configuration of '/models/none'. If you were trying to load it from 'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        "OSError: /models/nothing is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
    ],
    "unsupported_error": [
        "ValueError: ModelOpt NVFP4 native dense GEMM backends require SM100+. Use --fp4-gemm-backend marlin on SM80-SM90.",
        "flashinfer.utils.BackendSupportedError: mm_fp4 does not support backend 'cudnn' with capability 90",
        "NotImplementedError: Unsupported runner backend: MoeRunnerBackend.FLASHINFER_CUTLASS for quant method modelopt_fp4",
        "launch_server.py: error: argument --moe-runner-backend: invalid choice: 'flashinfer_b12x' (choose from 'auto', 'deep_gemm', 'triton')",
        "cudnn._compiled_module.cudnnGraphNotSupportedError: No execution plans support the graph.",
        "AssertionError: flashinfer_trtllm MoE only supports SM100",
        "AssertionError: Invalid quantization 'None'. ",
        "ValueError: Current platform does not support NVFP4 quantization with the selected MoE backend. Please use Blackwell and above",
        "ValueError: --moe-a2a-backend deepep is not supported with modelopt_fp4",
        "RuntimeError: cutlass_dsl expects arch to be one of [sm_100a, sm_103a], but got sm_121a",
    ],
    "jit_compile_failure": [
        "RuntimeError: Ninja build failed. Ninja output:",
        "ninja: build stopped: subcommand failed.",
        "ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'",
        "nvcc fatal   : Unsupported gpu architecture 'compute_120f'",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        '/opt/site/flashinfer/data/include/flashinfer/norm.cuh(25): error: identifier "__nv_fp4_e2m1" is undefined',
        "ptxas /tmp/tmpxft_0000.ptx, line 5512; error   : Instruction 'mma with block scale' not supported on .target 'sm_120'",
        "RuntimeError: Error building extension 'fused_moe_90'",
        "RuntimeError: NVRTC compilation failed: error: no operator matches these operands",
        "RuntimeError: FlashInfer requires CUDA toolkit, nvcc not found in PATH",
        "RuntimeError: Compilation failed for module 'fp4_quantization_120f', see build.log",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
        "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    ],
    "nan": [
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "[2026-11-29 12:04:59 TP0] WARNING sampler.py:90: Detected errors during sampling! NaN in the logits.",
        "ValueError: Out of range float values are not JSON compliant: nan",
        "AssertionError: NaN detected in logits",
        "RuntimeError: hidden states contain nan at layer 3",
        "AssertionError: Tensor contains NaN: model.layers.3.mlp output",
    ],
    "garbage": [
        "[2026-11-29 12:04:59] Finish: obj=GenerateReqInput(rid='2', text='Hi'), out={'text': '!!!!!!!!!!!!!!!!!!!!!!!!', 'meta_info': {}}",
        "[2026-11-29 12:04:59] Finish: obj=GenerateReqInput(rid='2', text='Hi'), out={'text': '"
        + "\ufffd" * 9
        + "', 'meta_info': {}}",
        "[2026-11-29 12:04:59] Finish: obj=GenerateReqInput(rid='2', text='Hi'), out={'text': '"
        + " the" * 40
        + "', 'meta_info': {}}",
        "run_fp4_blockwise_scaled_group_mm_sm100 half no implementation produced",
        "Accuracy: 0.000",
    ],
    "wrong_auto_selection": ["assert TopKOutputChecker.format_is_standard(topk_output)"],
}


@pytest.mark.parametrize(("wanted", "line"), [(name, line) for name, lines in OTHERS.items() for line in lines])
def test_other_lines_of_the_same_kinds(wanted, line):
    """Lines that no report holds, as the last exception of a start or of a server at work."""
    exception = line.split(":")[0].split(".")[-1].endswith(("Error", "Exception", "OutOfResources", "Unsupported"))
    tail = log_samples.crash(line) if exception or line.startswith("assert ") else [line]
    for head in (log_samples.start(ready=False), log_samples.start() + log_samples.traffic()):
        answer = classify(head + tail)
        assert answer.symptom_class == wanted, answer
        assert line in answer.line


QUIET = {
    "oom": "[2026-11-29 12:00:39 TP0] [Autotuner]: OOM detected, falling back to default tactic for trtllm::fused_moe::gemm1",
    "slow": "[2026-11-29 12:00:39 TP0] [Autotuner]: Skipping tactic <flashinfer.fused_moe.core.MoERunner object> 14, due to failure while profiling",
    "accuracy_loss": "[2026-11-29 12:00:39 TP0] Using KV cache scaling factor 1.0 for fp8_e5m2. This may cause less accurate results.",
}


@pytest.mark.parametrize(("name", "line"), QUIET.items())
def test_a_notice_names_its_class_and_leaves_the_verdict_ok(name, line):
    healthy = [*log_samples.start(ready=False), line, line, *log_samples.start()[-4:], *log_samples.traffic()]
    answer = classify(healthy)
    assert (answer.symptom_class, answer.verdict) == (name, Verdict.OK)
    assert "2 such lines" in answer.cause
    failed = classify(healthy + log_samples.crash("torch.OutOfMemoryError: CUDA out of memory."))
    assert (failed.symptom_class, failed.verdict) == ("oom", Verdict.OOM)
    assert "OutOfMemoryError" in failed.line


def test_a_warning_while_weights_load_is_a_notice():
    line = "[2026-11-29 12:00:20 TP0] w1_weight_scale_2 must match w3_weight_scale_2. Accuracy may be affected."
    healthy = log_samples.start()
    at = next(number for number, text in enumerate(healthy) if "Load weight begin" in text) + 1
    answer = classify([*healthy[:at], line, *healthy[at:], *log_samples.traffic()])
    assert (answer.verdict, answer.symptom_class, answer.line) == (Verdict.OK, "accuracy_loss", line)


def test_a_survived_failure_that_a_notice_quotes_is_no_failure():
    """The autotuner prints why it skipped a tactic; the same words alone are a failure."""
    quoted = "Failed to initialize cutlass TMA WS grouped gemm. Error: Error Internal"
    notice = f"[2026-11-29 12:00:39 TP0] [Autotuner]: Skipping tactic <MoERunner> 23, due to failure while profiling: {quoted}"
    healthy = [*log_samples.start(ready=False), notice, *log_samples.start()[-4:], *log_samples.traffic()]
    assert (classify(healthy).verdict, classify(healthy).symptom_class) == (Verdict.OK, "slow")
    assert classify([*healthy, quoted]).symptom_class == "garbage"


UNKNOWN = [
    "RuntimeError: flux capacitor misaligned with the tardis",
    "ValueError: 3 is an odd number",
    "KeyError: 'colour_of_magic'",
    "sglang.srt.foo.StrangeException: the moon is in the wrong house",
    "IndexError: list index out of range",
]


@pytest.mark.parametrize("line", UNKNOWN)
@pytest.mark.parametrize("ready", [False, True])
def test_an_unknown_failure_is_unknown_with_its_decisive_line(line, ready):
    """Neither the words in healthy lines nor a notice long before it turn it into something known."""
    head = log_samples.start(ready=ready) + (log_samples.traffic() if ready else [])
    answer = classify([*head[:10], QUIET["slow"], *head[10:], *log_samples.crash(line)])
    assert (answer.symptom_class, answer.verdict) == ("unknown", Verdict.CRASH)
    assert answer.line == line
    assert answer.reports == ()


@pytest.mark.parametrize(
    "other",
    [
        "[2026-11-29 12:04:59 TP0] Load weight end. elapsed=4.02 s, type=LlamaForCausalLM, avail mem=120.00 GB.",
        "[2026-11-29 12:04:59 TP0] Memory pool end. avail mem=27.33 GB",
        '[2026-11-29 12:04:59] INFO:     127.0.0.1:50001 - "POST /generate HTTP/1.1" 400 Bad Request',
    ],
)
@pytest.mark.parametrize("line", UNKNOWN)
def test_a_line_of_another_rank_inside_a_traceback_is_not_its_exception(line, other):
    crash = log_samples.crash(line)
    for at in (1, 2, 4, 6):  # before, between and after the frames
        answer = classify([*log_samples.start(ready=False), *crash[:at], other, *crash[at:]])
        assert (answer.symptom_class, answer.line) == ("unknown", line)


@pytest.mark.parametrize("ready", [False, True])
def test_a_log_cut_inside_a_traceback_is_a_crash(ready):
    frames = ["Traceback (most recent call last):", *log_samples.FRAMES]
    answer = classify([*log_samples.start(ready=ready), *frames])
    assert (answer.verdict, answer.symptom_class, answer.line) == (Verdict.CRASH, "unknown", frames[-1])
    assert "not in it" in answer.cause


def test_the_process_that_died_first_is_the_decisive_line():
    line = "[2026-11-29 12:09:00] Detokenizer process died unexpectedly with exit code -9"
    answer = classify([*log_samples.start(), *log_samples.traffic(), line, *log_samples.AFTERMATH])
    assert (answer.verdict, answer.symptom_class, answer.line) == (Verdict.CRASH, "unknown", line)


@pytest.mark.parametrize("line", ["Accuracy: 0.912", "Accuracy: 0.05", "accept_score: 0.0 so far"])
def test_a_score_above_zero_is_no_failure(line):
    assert classify([*log_samples.start(), *log_samples.traffic(), line]).verdict is Verdict.OK


@pytest.mark.parametrize(("function", "known"), [("load_weights", True), ("forward", False)])
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("RuntimeError: start (1024) + length (1024) exceeds dimension size (1024).", "checkpoint_layout"),
        ("RuntimeError: output with shape [1024] doesn't match the broadcast shape [256, 1024]", "checkpoint_layout"),
        (
            "RuntimeError: The expanded size of the tensor (30) must match the existing size (15) at dimension 1.",
            "checkpoint_layout",
        ),
        ("AssertionError: weight_scale_2 must be the same for w1 and w3", "checkpoint_layout"),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "crash_at_load"),
    ],
)
def test_a_size_that_does_not_fit_is_the_checkpoints_only_while_it_is_loaded(function, known, line, wanted):
    frame = f'  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/models/llama.py", line 712, in {function}'
    crash = log_samples.crash(line)
    answer = classify([*log_samples.start(), crash[0], frame, "    narrow(x)", *crash[-5:]])
    assert (answer.symptom_class, answer.line) == (wanted if known else "unknown", line)


def test_healthy_logs_are_ok():
    for lines in (log_samples.start(), log_samples.start() + log_samples.traffic(300)):
        for exit_state in (None, 0, -15, "running"):
            answer = classify(lines, exit_state)
            assert (answer.verdict, answer.symptom_class, answer.reports) == (Verdict.OK, "unknown", ())
            assert "ready to roll" in answer.line


def test_what_the_server_survived_is_no_failure():
    """An exception of one request, and an optional import that failed before the server got ready."""
    request = [
        "[2026-11-29 12:02:00] Traceback (most recent call last):",
        *log_samples.FRAMES,
        "ValueError: the prompt is longer than the model's context",
    ]
    optional = [
        "[2026-11-29 12:00:03] Failed to import deep_gemm: /opt/deep_gemm.so: undefined symbol: _ZTI9exception",
        "Traceback (most recent call last):",
        *log_samples.FRAMES,
        "ImportError: libfoo.so.1: cannot open shared object file: No such file or directory",
    ]
    start = log_samples.start()
    assert classify(start[:6] + optional + start[6:]).verdict is Verdict.OK
    assert classify(start + request + log_samples.traffic()).verdict is Verdict.OK
    assert classify(start + log_samples.traffic() + request).symptom_class == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-29 12:00:12 TP0] NCCL error: connection refused by peer, retrying communicator init (1/3)",
        "WARNING:urllib3.connectionpool:Retrying (Retry(total=2)) after connection broken by 'OSError(101, Out of memory)'",
        "Exception ignored in: <function Pool.__del__ at 0x7f>: torch.OutOfMemoryError: CUDA out of memory",
    ],
)
def test_what_the_program_says_it_ignores_or_tries_again_is_no_failure(line):
    start = log_samples.start()
    assert classify([*start[:9], line, *start[9:], *log_samples.traffic()]).verdict is Verdict.OK
    unknown = classify([*start[:9], line, *start[9:12], *log_samples.crash(UNKNOWN[0])])
    assert (unknown.symptom_class, unknown.line) == ("unknown", UNKNOWN[0])


def test_a_device_fault_is_not_survived():
    """The other ranks go on printing batches for a while."""
    lines = [
        *log_samples.start(),
        "[2026-11-29 12:02:00 TP1] CUDA error: an illegal memory access was encountered",
        *log_samples.traffic(),
    ]
    assert classify(lines).symptom_class == "crash_at_runtime"


def test_the_first_cause_wins_over_what_follows_from_it():
    lines = log_samples.start() + log_samples.crash(
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", rank=1
    )
    lines += [
        "[rank0]:[E1129 12:09:59 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=14)"
    ]
    lines += log_samples.crash("RuntimeError: NCCL error: remote process exited or there was a network error", rank=0)
    answer = classify(lines)
    assert answer.symptom_class == "crash_at_runtime" and "illegal memory access" in answer.line


def test_a_chained_exception_takes_the_known_one():
    lines = [
        *log_samples.start(ready=False),
        "Traceback (most recent call last):",
        *log_samples.FRAMES,
        "KeyError: 'fused_moe_103'",
        "",
    ]
    lines += ["During handling of the above exception, another exception occurred:", ""]
    lines += log_samples.crash("RuntimeError: Ninja build failed. Ninja output:")
    assert classify(lines).symptom_class == "jit_compile_failure"


def test_the_last_start_of_a_log_counts():
    """A supervisor that restarts the server writes all starts into one log."""
    failed = log_samples.start(ready=False) + log_samples.crash("torch.OutOfMemoryError: CUDA out of memory.")
    assert classify(failed + log_samples.start() + log_samples.traffic()).verdict is Verdict.OK
    assert classify(log_samples.start() + failed).symptom_class == "oom"
    assert classify(failed + log_samples.start()[:8]).symptom_class == "oom"


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 38191,"
        " useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_a_port_that_somebody_took_says_nothing_about_the_arm(line):
    answer = classify([*log_samples.start(ready=False), *log_samples.crash(line)], 1)
    assert answer.verdict is Verdict.NOT_RUN and answer.symptom_class.startswith("crash_at_")
    assert "ddress already in use" in answer.line


def test_exit_state_without_a_word_in_the_log():
    silent = log_samples.start(ready=False)
    assert classify(silent).verdict is Verdict.NOT_RUN
    assert classify(silent, "timeout").symptom_class == "hang"
    killed = classify(silent, -9)
    assert (killed.verdict, killed.symptom_class, killed.line) == (Verdict.CRASH, "unknown", silent[-1])
    assert "signal 9" in killed.cause
    empty = classify([])
    assert (empty.verdict, empty.line, empty.line_number) == (Verdict.NOT_RUN, None, None)


def test_other_loggers_around_the_same_line():
    """vLLM workers, Kubernetes, docker compose, torchrun: the prefix changes, the answer does not."""
    bare = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in forward',
        "    x = mm_fp4(a, b)",
        "RuntimeError: Invalid sf layout in run",
    ]
    prefixes = [
        "(EngineCore_DP0 pid=1234) ERROR 11-29 12:00:00 [core.py:708] ",
        "2026-11-29T12:00:00.123456789Z stderr F ",
        "sglang-1  | ",
        "[rank0]: ",
        "\x1b[31m[2026-11-29 12:00:00 DP1 TP3 EP3]\x1b[0m ",
    ]
    for prefix in prefixes:
        answer = classify([prefix + line for line in bare])
        assert (answer.symptom_class, answer.line_number) == ("crash_at_runtime", 4), prefix
        assert "\x1b" not in answer.line


def test_bytes_that_are_no_text(tmp_path):
    """Binary junk, invalid UTF-8, NUL bytes, a line of megabytes: the failure is still found, at its line."""
    noise = random.Random(7).randbytes(300_000).replace(b"\n", b" ")
    tail = b"\xff\xfe RuntimeError: Invalid sf layout in run \x00\x1b[0m"
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(b"\n".join([noise, b"x" * 3_000_000, b"y" * 65_530 + tail])))
    answer = logs.classify(path)
    assert (answer.symptom_class, answer.line_number) == ("crash_at_runtime", 3)
    json.dumps(answer.as_contract())


def test_a_large_log_is_read_fast_and_at_constant_memory(tmp_path):
    """20 MB of traffic: a gigabyte stays within minutes."""
    path = tmp_path / "server.log"
    block = ("\n".join(log_samples.traffic(200)) + "\n").encode()
    with path.open("wb") as file:
        file.write(("\n".join(log_samples.start()) + "\n").encode())
        for _ in range(20_000_000 // len(block)):
            file.write(block)
        file.write("\n".join(log_samples.crash("RuntimeError: Invalid sf layout in run")).encode())
    started = time.monotonic()
    answer = logs.classify(path)
    assert time.monotonic() - started < 10
    assert answer.symptom_class == "crash_at_runtime"


def test_every_signature_is_sound_data():
    """Classes exist, reports exist, and every signature is reachable: its own reports or the samples here hit it."""
    known = logs_signatures.reports()
    classes = {report.symptom_class for report in known.values()}
    for signature in logs_signatures.load():
        assert signature.symptom_class in classes, signature.id
        assert set(signature.reports) <= known.keys(), signature.id
        assert signature.cause.endswith(".") and signature.advice.endswith("."), signature.id
    assert len({signature.id for signature in logs_signatures.load()}) == len(logs_signatures.load())


def test_the_command_prints_the_contract(tmp_path, capsys):
    path = tmp_path / "server.log"
    path.write_text("\n".join(log_samples.start(ready=False) + log_samples.crash("RuntimeError: Invalid sf layout in run")))
    assert cli.main(["classify", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["verdict", "class", "line", "line_number", "cause", "try", "reports"]
    assert answer["class"] == "crash_at_runtime" and answer["reports"][0] == "fi-3367-autotune-cache-collision"
    assert cli.main(["classify", str(path)]) == 0
    assert "Invalid sf layout" in capsys.readouterr().out
    assert cli.main(["classify", str(tmp_path / "none.log")]) == 2
    assert "cannot be read" in capsys.readouterr().err
