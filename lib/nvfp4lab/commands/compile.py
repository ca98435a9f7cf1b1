"""Build kernels for GPUs that are not here and print what their machine code says."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[PARAMS] and what overrides it."""
    parser.add_argument("params", metavar="PARAMS", nargs="?", type=Path, help="params file; without one the defaults hold")
    parser.add_argument("--arch", action="append", metavar="ARCH", help="such as 120a; may be repeated")
    parser.add_argument("--module", action="append", metavar="NAME", help="see --list; may be repeated")
    parser.add_argument("--sglang", metavar="VERSION", help="PyPI version, wheel file or folder; overrides PARAMS")
    parser.add_argument("--flashinfer", metavar="VERSION", help="the same for FlashInfer")
    parser.add_argument("--all-units", action="store_true", help="every file of a module, not only its representative one")
    parser.add_argument("--list", action="store_true", help="print the modules and stop")
    parser.add_argument("--json", action="store_true", help="print the evidence as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Evidence to stdout and to the ledger of the run folder; 0 unless a build failed for no reason of the target."""
    from nvfp4lab import params
    from nvfp4lab.kernels import compile_evidence, compile_modules
    from nvfp4lab.records import Verdict

    if args.list:
        for module in compile_modules.MODULES.values():
            print(f"{module.full_name:40} {'quick' if module.quick else f'{module.peak_gib:g} GiB':8} {module.about}")
        return 0
    p = params.load(args.params) if args.params else params.Params()
    asked = p.model_dump() | {
        "sglang": args.sglang or p.sglang,
        "flashinfer": args.flashinfer or p.flashinfer,
        "compile_archs": args.arch or p.compile_archs,
        "compile_modules": args.module or p.compile_modules,
        "compile_all_units": args.all_units or p.compile_all_units,
    }
    p = params.check(asked, where="nvfp4lab compile")
    failed = False
    for evidence in compile_evidence.collect(p):
        failed |= evidence.verdict in (Verdict.CRASH, Verdict.HANG, Verdict.OOM)
        if args.json:
            print(evidence.to_json(), flush=True)
    return 1 if failed else 0
