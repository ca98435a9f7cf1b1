"""Pack SGLang, prebuilt kernels, fixture models and the lab for a GPU host without internet."""

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="made there: DIR/bundle, DIR/parts; DIR/build resumes a stopped call"
    )
    parser.add_argument("--sglang", required=True, metavar="VERSION", help="SGLang release, such as 0.5.17")
    parser.add_argument("--python", required=True, metavar="X.Y", help="the GPU host's Python, such as 3.12")
    parser.add_argument("--arch", required=True, metavar="CC", help="CUDA target of the GPU: 9.0a, 10.0a, 12.0f, ...")
    parser.add_argument(
        "--glibc", default="2.35", metavar="X.Y", help="the GPU host's C library (`ldd --version`); default %(default)s"
    )
    parser.add_argument(
        "--host-packages", type=Path, metavar="FILE", help="`pip list --format=freeze` of the GPU host: these are not carried"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="carry what is trimmed by default: flash-attention, ..."
    )
    parser.add_argument(
        "--fixture", action="append", default=[], metavar="NAME", help="write this fixture model into the bundle; may be repeated"
    )
    parser.add_argument(
        "--no-kernels", action="store_true", help="wheels only; kernels are then compiled when a server first starts"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="modules compiled at a time; default %(default)s"
    )
    parser.add_argument(
        "--split-mib", type=int, metavar="N", help="also write DIR/parts: a tar.xz in parts of at most N MiB, and unpack.sh"
    )


def run(args: argparse.Namespace) -> int:
    from nvfp4lab.bundle import make, recipe

    request = recipe.Request(
        sglang=args.sglang,
        python=args.python,
        arch=args.arch,
        directory=args.directory.absolute(),
        glibc=args.glibc,
        keep=frozenset(args.keep),
        host=recipe.read_host_packages(args.host_packages) if args.host_packages else {},
        fixtures=tuple(args.fixture),
        jobs=args.jobs,
        split_mib=args.split_mib,
    )
    print(make.make(request, with_kernels=not args.no_kernels))
    return 0
