"""Facts read from the source of SGLang and FlashInfer, as JSON."""

import argparse
import gc
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    place = "PyPI version, wheel file, installed folder or checkout"
    parser.add_argument("--sglang", metavar="VERSION|PATH", help=place)
    parser.add_argument("--flashinfer", metavar="VERSION|PATH", help=place)
    parser.add_argument("--json", metavar="FILE", required=True, help="where the list of facts is written; - for standard output")
    parser.add_argument("--parse-all", action="store_true", help="name every file that does not parse, also those never asked for")


def run(args: argparse.Namespace) -> int:
    from nvfp4lab.errors import LabError
    from nvfp4lab.source import facts, flashinfer_facts, report, sglang_facts
    from nvfp4lab.source.package import resolve

    gc.disable()  # the syntax trees live until the command ends; collecting them takes as long as reading
    wanted = [("sglang", args.sglang, sglang_facts.read), ("flashinfer", args.flashinfer, flashinfer_facts.read)]
    wanted = [row for row in wanted if row[1] is not None]
    if not wanted:
        raise LabError("nothing to read: give --sglang or --flashinfer (or both)", exit_code=2)
    packages = [(resolve(place, name), read) for name, place, read in wanted]
    found: list[facts.Fact] = []
    for package, read in packages:
        own, cost = report.facts_of(package, read, args.parse_all)
        found += own
        print(cost.line(package, len(own)), file=sys.stderr)
        for member, reason in sorted(cost.unparsable.items()):
            print(f"  not parsable, left out: {member}: {reason}", file=sys.stderr)
        for fact in own:
            if fact.predicate == "not_found":
                print(f"  not found: {fact.subject} {fact.value}: {fact.note}", file=sys.stderr)
    gc.freeze()  # nor is the last collection at exit worth its seconds
    facts.write_json(found, "/dev/stdout" if args.json == "-" else args.json)
    return 0
