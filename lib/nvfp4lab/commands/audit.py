"""Audit an NVFP4 checkpoint: is it sound, and which flags can matter for it? Exits 1 when anything is wrong, 2 without one."""

import argparse
import collections
import dataclasses
import json

SHOWN_PER_KIND = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """DIR and the parallel sizes to check alignment for."""
    parser.add_argument("directory", metavar="DIR", help="checkpoint folder, or a hub cache's models--owner--name folder")
    parser.add_argument(
        "--tp", "--tp-size", type=int, metavar="N", help="check alignment of every rank's part for this tensor parallelism"
    )
    parser.add_argument("--ep", "--ep-size", type=int, metavar="N", help="the same for expert parallelism")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print findings, layer counts and moot flags; 1 when there are findings."""
    from nvfp4lab.errors import LabError
    from nvfp4lab.nvfp4.audit import audit, moot_flags

    if any(size is not None and size < 1 for size in (args.tp, args.ep)):
        raise LabError("--tp and --ep need a positive number", exit_code=2)
    try:
        report = audit(args.directory, tp=args.tp, ep=args.ep)
    except LabError as error:
        raise LabError(str(error), exit_code=2) from error  # 1 is taken: it means findings
    if args.json:
        findings = [dataclasses.asdict(finding) for finding in report.findings]
        print(
            json.dumps(
                {"findings": findings, "summary": dataclasses.asdict(report.summary), "moot": moot_flags(report.summary)}, indent=2
            )
        )
        return 1 if report.findings else 0
    shown: collections.Counter[str] = collections.Counter()
    for finding in report.findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= SHOWN_PER_KIND:
            where = f" in {finding.where}" if finding.where else ""
            print(f"{finding.kind}: {finding.tensor}{where}: {finding.what}\n    hurts: {finding.hurts}\n    fix:   {finding.fix}")
    for kind, count in shown.items():
        if count > SHOWN_PER_KIND:
            print(f"{kind}: {count - SHOWN_PER_KIND} more; --json lists them all")
    summary = report.summary
    counts = ", ".join(f"{kind} {summary.fp4[kind]}/{summary.fp4[kind] + summary.other[kind]}" for kind in summary.fp4)
    size = f"{summary.tensors} tensors, {summary.shards} shards, {summary.size_bytes / 2**30:.2f} GiB"
    print(f"{summary.architecture}: {size}; FP4 layers: {counts}")
    for flag, reason in moot_flags(summary).items():
        print(f"moot: {flag}: {reason}")
    print(f"{len(report.findings)} findings" if report.findings else "no findings")
    return 1 if report.findings else 0
