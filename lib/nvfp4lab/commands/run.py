"""Execute the notebooks of one or more params files and write pages, evidence and an index."""

import argparse
import datetime
import errno
import signal
import sys
from pathlib import Path

from nvfp4lab.errors import LabError

MIN_FREE_GIB = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `nvfp4lab run`."""
    parser.add_argument("params", nargs="+", type=Path, metavar="PARAMS", help="params files (YAML)")
    parser.add_argument("--only", default="", help="comma-separated notebook prefixes, such as 10,31")
    parser.add_argument("--out", type=Path, help="run folder (default: outputs/<params>-<time>)")
    parser.add_argument("--resume", action="store_true", help="go on with --out, or with the newest run of these params")
    parser.add_argument("--retry", choices=["failed"], help="run failed pieces again (implies --resume)")
    parser.add_argument("--executor", default="local", help="local, ray or slurm")
    parser.add_argument("--workers", type=int, help="notebooks at once with the local executor")


def run(args: argparse.Namespace) -> int:
    """Plan, execute, summarise; returns the exit code of the run. SIGTERM ends it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    from nvfp4lab.batch import executors, plan
    from nvfp4lab.batch import run as coordinator

    run_dir = _run_dir(args, coordinator)
    only = [prefix for prefix in args.only.split(",") if prefix]
    planned = plan.of_params(args.params, only, run_dir.resolve())
    free_gib = coordinator.free_space_gib(run_dir)
    if free_gib < MIN_FREE_GIB:
        raise LabError(f"only {free_gib:.2f} GiB free for {run_dir}; free some space or choose another --out", exit_code=3)
    engine = executors.create(args.executor, **({"workers": args.workers} if args.executor == "local" else {}))
    try:
        summary = coordinator.run(planned, run_dir.resolve(), engine, retry_failed=args.retry == "failed")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise LabError(
                f"cannot write to {run_dir}: {error.strerror}; what was written is kept, free space and --resume", 3
            ) from error
        raise
    _print_summary(summary, run_dir, args)
    return int(summary.exit_code)


def _run_dir(args: argparse.Namespace, coordinator) -> Path:
    name = "+".join(path.stem for path in args.params)
    if args.out:
        if args.out.exists() and not args.out.is_dir():
            raise LabError(f"{args.out} is a file; --out needs a folder, an empty or a new one")
        holds_run = (args.out / "plan.json").exists()
        if holds_run and not (args.resume or args.retry):
            raise LabError(f"{args.out} holds a run already; add --resume to go on with it", exit_code=2)
        if not holds_run and (args.out / "ledger.jsonl").exists():
            raise LabError(
                f"{args.out}/ledger.jsonl holds records of work by hand, which a run would replace; choose another --out"
            )
        return args.out
    if args.resume or args.retry:
        newest = coordinator.newest_run(Path("outputs"), name)
        if newest is None:
            raise LabError(f"nothing to resume: no run of {name} under outputs/")
        return newest
    return Path("outputs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _print_summary(summary, run_dir: Path, args: argparse.Namespace) -> None:
    from nvfp4lab.batch.run import Exit

    for result in summary.results:
        print(f"{result.verdict:12} {result.seconds:7.1f} s  {result.name}" + (f": {result.reason}" if result.reason else ""))
    for record in summary.bad:
        print(f"{record.verdict:12} {record.stage} {record.subject}: {record.reason}")
    if summary.exit_code is Exit.RESUMABLE:
        print(f"incomplete; go on with: nvfp4lab run {' '.join(map(str, args.params))} --out {run_dir} --resume", file=sys.stderr)
    print(f"report: {run_dir / 'index.html'}")


def _as_interrupt(*_) -> None:
    raise KeyboardInterrupt
