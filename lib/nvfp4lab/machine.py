"""What can be asked of this machine: one row a question, with the reason where the answer is "not here"."""

import dataclasses
import importlib.util
import shutil
from collections.abc import Sequence

from matplotlib.figure import Figure

from nvfp4lab import stack
from nvfp4lab.records import Verdict
from nvfp4lab.report.style import VERDICT_COLOURS, figure


@dataclasses.dataclass(frozen=True)
class Question:
    """One question, the notebook that answers it, and whether this machine can. reason: what is missing, "" if nothing."""

    text: str
    notebook: str
    reason: str = ""

    @property
    def can_ask(self) -> bool:
        """Whether nothing is missing."""
        return not self.reason


def questions() -> tuple[Question, ...]:
    """All questions, in reading order, judged for this machine."""
    gpu = "" if stack.gpu_names() else "no NVIDIA GPU here"
    flashinfer = "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    sglang = "" if importlib.util.find_spec("sglang") else "sglang is not installed"
    nvcc = "" if shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin") else "no nvcc on the PATH"
    on_gpu = gpu or flashinfer
    return (
        Question("Which kernel does each flag reach?", "10_dispatch_routes"),
        Question("What changed between two versions?", "11_version_diff"),
        Question("What is an NVFP4 number?", "20_nvfp4_format"),
        Question("Would our checks notice a broken kernel?", "21_gate_certificate"),
        Question("Does the gate notice a narrow accumulator (emulated)?", "22_gemm_kernels"),
        Question("Which dense FP4 GEMM kernels are right and fast?", "22_gemm_kernels", on_gpu),
        Question("Which fused MoE kernels are right and fast?", "23_moe_kernels", on_gpu),
        Question("What would a kernel compile to on another GPU?", "24_compile_evidence", nvcc),
        Question("Is the checkpoint sound?", "30_checkpoint_audit"),
        Question("Does a bf16 or dequantised server answer right?", "31_server_matrix", sglang),
        Question("Which NVFP4 arms start and answer right?", "31_server_matrix", sglang or gpu),
        Question("How fast is each arm, and is it right meanwhile?", "32_server_throughput", sglang),
        Question("What should I launch, and why?", "40_decision"),
    )


def draw(rows: Sequence[Question]) -> Figure:
    """One bar a question: green where it can be asked here, grey with the reason where not."""
    made = figure(8.5, 0.36 * len(rows) + 0.8)
    axes = made.subplots()
    colours = [VERDICT_COLOURS[Verdict.OK if row.can_ask else Verdict.UNSUPPORTED] for row in rows]
    axes.barh(range(len(rows)), [1] * len(rows), color=colours, height=0.8)
    for place, row in enumerate(rows):
        note = row.notebook if row.can_ask else f"{row.notebook}: {row.reason}"
        axes.text(0.01, place, note, va="center", color="white" if row.can_ask else "black", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.text for row in rows], fontsize=9)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.set_title("What can be asked of this machine", loc="left", fontsize=11)
    return made
