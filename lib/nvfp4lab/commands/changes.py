"""What changed between two versions of SGLang or FlashInfer: auto, choices, wiring, gates, where flags end."""

import argparse
import dataclasses
import json

from nvfp4lab.source.diff import TOPICS
from nvfp4lab.source.params import SourceParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two versions of either package; each a PyPI version, wheel file, installed folder or checkout."""
    defaults = SourceParams()
    parser.add_argument("--sglang", nargs=2, metavar=("OLD", "NEW"), help="compare two SGLang")
    parser.add_argument("--flashinfer", nargs=2, metavar=("OLD", "NEW"), help="compare two FlashInfer")
    parser.add_argument("--cc", default=defaults.cc, help="compute capability for which routes are compared, such as 12.0")
    parser.add_argument("--quant", default=defaults.quant, help="effective quantisation of the checkpoint")
    parser.add_argument(
        "--topic", action="append", choices=[*TOPICS, "other"], metavar="TOPIC", help=f"only this one: {', '.join(TOPICS)}, other"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the changes; exit code 0 also when there are some."""
    from nvfp4lab.errors import LabError
    from nvfp4lab.source import diff, diff_text, flashinfer_facts
    from nvfp4lab.source.package import resolve
    from nvfp4lab.source.routes import open_router
    from nvfp4lab.source.routes_query import Query

    if not args.sglang and not args.flashinfer:
        raise LabError("nothing to compare: give --sglang OLD NEW, --flashinfer OLD NEW, or both", exit_code=2)
    found: dict[str, list] = {}
    if args.sglang:
        old, new = (open_router(wanted, "none") for wanted in args.sglang)
        query = Query(args.cc, args.quant)
        found[f"routes on {args.cc}: {old.names} -> {new.names}"] = diff.of_routes(old.routes(query), new.routes(query))
        found[f"facts: {old.names} -> {new.names}"] = diff.of_facts(old.facts, new.facts)
    if args.flashinfer:
        packages = [resolve(wanted, "flashinfer") for wanted in args.flashinfer]
        title = f"facts: flashinfer {packages[0].version} -> {packages[1].version}"
        found[title] = diff.of_facts(*(flashinfer_facts.read_cached(package) for package in packages))
    if args.json:
        rows = {title: [dataclasses.asdict(change) for change in changes] for title, changes in found.items()}
        print(json.dumps(rows, indent=1, ensure_ascii=False, default=dict))
        return 0
    for title, changes in found.items():
        print(f"# {title}\n{diff_text.listing(changes, args.topic)}\n")
    return 0
