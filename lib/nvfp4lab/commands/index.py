"""Write one page that links every run under a folder, newest first."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `nvfp4lab index`."""
    parser.add_argument("outputs", nargs="?", type=Path, default=Path("outputs"), help="folder of runs (default: outputs)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from nvfp4lab.errors import LabError
    from nvfp4lab.report import index

    if not args.outputs.is_dir():
        raise LabError(f"{args.outputs}: no such folder")
    print(index.write_all(args.outputs))
    return 0
