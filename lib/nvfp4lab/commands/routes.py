"""Which kernel does each backend flag reach, for one SGLang on one GPU? Read from source."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4lab.errors import LabError
from nvfp4lab.source.params import SourceParams

if TYPE_CHECKING:
    from nvfp4lab.source.routes_query import Route


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The question; defaults are those of the notebooks' parameters."""
    defaults = SourceParams()
    parser.add_argument("--sglang", default=defaults.sglang, help="PyPI version, wheel file, installed folder or checkout")
    parser.add_argument("--flashinfer", help="the same for FlashInfer; left out: the version that SGLang pins; 'none': ask none")
    parser.add_argument("--cc", default=defaults.cc, help="compute capability, such as 12.0")
    parser.add_argument("--quant", default=defaults.quant, help="effective quantisation of the checkpoint")
    parser.add_argument("--model-arch", help="architectures[0] of config.json")
    parser.add_argument("--a2a", default=defaults.a2a, help="--moe-a2a-backend")
    parser.add_argument("--tp", type=int, default=defaults.tp, help="tensor parallel size")
    parser.add_argument("--ep", type=int, default=defaults.ep, help="expert parallel size")
    parser.add_argument("--gated", action=argparse.BooleanOptionalAction, default=defaults.gated, help="experts are gated (SwiGLU)")
    flag = parser.add_mutually_exclusive_group()
    flag.add_argument("--flag-given", dest="flag_given", action="store_true", help="--quantization is on the server's command line")
    flag.add_argument("--flag-absent", dest="flag_given", action="store_false", help="it is not (default)")
    parser.set_defaults(flag_given=defaults.flag_given)
    parser.add_argument("--op", choices=("moe", "fp4_gemm"), help="only one of the two flags")
    parser.add_argument("--backend", help="only this value")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the list of routes as JSON, to FILE or standard output"
    )


def _only(routes: "list[Route]", backend: str) -> "list[Route]":
    """The routes of one value. Raises LabError when no flag that was asked about has it."""
    found = [route for route in routes if route.backend == backend]
    if not found:
        known = ", ".join(dict.fromkeys(route.backend for route in routes)) or "none"
        raise LabError(f"no backend {backend!r}; the flags asked about have: {known}", exit_code=2)
    return found


def run(args: argparse.Namespace) -> int:
    """Print the routes, traps first; exit code 0."""
    from nvfp4lab.source import routes_text
    from nvfp4lab.source.routes import open_router
    from nvfp4lab.source.routes_query import Query

    query = Query(args.cc, args.quant, args.model_arch, args.a2a, args.tp, args.ep, args.gated, args.flag_given)
    router = open_router(args.sglang, args.flashinfer)
    found = router.routes(query, (args.op,) if args.op else ("moe", "fp4_gemm"))
    if args.backend is not None:
        found = _only(found, args.backend)
    if args.json is None:
        print(routes_text.listing(found, query, router.names))
        return 0
    text = json.dumps([route.to_json() for route in found], indent=1, ensure_ascii=False)
    if args.json == "-":
        print(text)
    else:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
        print(f"{len(found)} routes written to {args.json}", file=sys.stderr)
    return 0
