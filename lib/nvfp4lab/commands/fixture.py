"""Build a fixture model (a small real checkpoint) into a folder and print that folder."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """NAME DIR."""
    parser.add_argument("name", metavar="NAME", help="smol-bf16, smol-padded-bf16, smol-nvfp4, smol-moe-bf16, smol-moe-nvfp4, ...")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint's own folder; reused when it is whole")


def run(args: argparse.Namespace) -> int:
    """Print the folder on stdout; progress of the libraries goes to stderr."""
    from nvfp4lab.nvfp4 import fixtures

    print(fixtures.build(args.name, args.directory))
    return 0
