"""Pictures of the certificate: the kill matrix, how many faults each check lets through, what the tiers tell apart."""

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from nvfp4lab.kernels import reference
from nvfp4lab.kernels.certificate import Certificate
from nvfp4lab.kernels.poison import run_poisoned
from nvfp4lab.kernels.probes_exact import TIERS, exact_gemm
from nvfp4lab.kernels.published import PUBLISHED
from nvfp4lab.kernels.reference import Order
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.records import Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, figure

CAUGHT, PASSED = VERDICT_COLOURS[Verdict.OK], VERDICT_COLOURS[Verdict.WRONG]


def kill_matrix(certificate: Certificate, op: str) -> Figure:
    """Rows: faults of `op` ("gemm" or "moe"). Columns: our gate, then the published checks. Orange: the fault passes."""
    kills = [kill for kill in certificate.judged if kill.fault.op == op]
    gates = [gate for gate in PUBLISHED if op in gate.ops]
    rows = [
        [0 if kill.killed else 1, *(int(kill.fault.name in certificate.published[gate.name]) for gate in gates)] for kill in kills
    ]
    fig = figure(7.5, 1.2 + 0.17 * len(kills))
    axes = fig.add_subplot()
    axes.pcolormesh(rows, cmap=ListedColormap([CAUGHT, PASSED]), vmin=0, vmax=1, edgecolors="white", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_yticks([row + 0.5 for row in range(len(kills))], [kill.fault.name for kill in kills], fontsize=7)
    axes.set_xticks(
        [column + 0.5 for column in range(len(gates) + 1)],
        ["this lab", *(gate.name for gate in gates)],
        rotation=40,
        ha="left",
        fontsize=8,
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_title(f"{op}: green, the check notices; orange, the broken kernel passes", fontsize=9)
    return fig


def survivors_bar(certificate: Certificate) -> Figure:
    """Share of the faults that each check lets through."""
    fig = figure(7.5, 3.2)
    axes = fig.add_subplot()
    names, shares = ["this lab"], [len(certificate.survivors) / len(certificate.judged)]
    for gate in PUBLISHED:
        total = sum(kill.fault.op in gate.ops for kill in certificate.judged)
        names.append(f"{gate.name}  ({gate.criterion})")
        shares.append(len(certificate.published[gate.name]) / total)
    axes.barh(names, [100 * share for share in shares], color=[SERIES_COLOURS[0]] + [PASSED] * len(PUBLISHED))
    axes.invert_yaxis()
    axes.set_xlabel("broken kernels let through, %")
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlim(0, 100)
    return fig


def accumulator_ladder(seed: int = 0) -> Figure:
    """Share of right values for each accumulator type on each magnitude tier: how the tiers reveal its width."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    probes = [exact_gemm(GemmShape(64, 64, 512), seed, bits) for bits in TIERS]
    share = [
        [
            (run_poisoned(reference.gemm_in(Order("blocked", 16, kind)), probe.problem) == probe.expected).double().mean().item()
            for probe in probes
        ]
        for kind in types
    ]
    fig = figure(5.0, 1.9)
    axes = fig.add_subplot()
    axes.pcolormesh(share, cmap=ListedColormap([PASSED, CAUGHT]), vmin=0.0, vmax=1.9999, edgecolors="white")
    for row, values in enumerate(share):
        for column, value in enumerate(values):
            axes.text(column + 0.5, row + 0.5, f"{100 * value:.0f} %", ha="center", va="center")
    axes.set_yticks([row + 0.5 for row in range(len(types))], [str(kind).removeprefix("torch.") for kind in types])
    axes.set_xticks([column + 0.5 for column in range(len(probes))], [f"sums up to 2^{bits} units" for bits in TIERS])
    axes.tick_params(length=0)
    axes.set_title("values that are right, by accumulator type and tier", fontsize=9)
    return fig
