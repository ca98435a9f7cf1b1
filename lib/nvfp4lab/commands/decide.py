"""Join the evidence of runs into the flags to launch with, the reasons, and when to ask again."""

import argparse
import json
import re
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `nvfp4lab decide`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, ledger.jsonl, or a params file to ask about")
    parser.add_argument("--cc", help="compute capability asked about (default: what the evidence is about)")
    parser.add_argument("--sglang", help="SGLang version asked about")
    parser.add_argument("--flashinfer", help="FlashInfer version asked about")
    parser.add_argument("--model", help="what to put behind --model-path")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the decision; exit code 0 with a recommendation or an honest reason why there is none."""
    from nvfp4lab.decide import Question, decide
    from nvfp4lab.decide.gather import gather
    from nvfp4lab.errors import LabError
    from nvfp4lab.source import capability

    if args.cc and not re.fullmatch(rf"{capability.PATTERN}|cpu", args.cc):
        raise LabError(f"--cc {args.cc}: needs a compute capability such as 9.0 or 12.0, or cpu", exit_code=2)
    question, records = gather(args.runs, {name: getattr(args, name) for name in ("cc", "sglang", "flashinfer", "model")})
    decision = decide(question or Question(args.cc or "unknown", args.sglang, args.flashinfer), records)
    if args.json:
        print(json.dumps(decision.to_data(), ensure_ascii=False))
        return 0
    print("\n".join(lines(decision)))
    return 0


def lines(decision) -> list[str]:
    """The decision for a terminal: contradictions, the command, why, what stands beside it, why not the others, expiry."""
    from nvfp4lab.decide.standing import Confidence

    told = [f"CONTRADICTION {contradiction}" for contradiction in decision.contradictions]
    told.append(decision.command or "no recommendation")
    told.append(f"why: {decision.why}" + (f" ({decision.confidence})" if decision.confidence else ""))
    told += [f"also: {line}" for line in decision.beside]
    told += [f"moot: {line}" for line in decision.moot]
    told += [f"not {rejected.op} {rejected.backend}: {rejected.why}" for rejected in decision.rejected]
    told += [
        f"{Confidence.REPORTED}, {r.id} ({'; '.join(filter(None, (r.source, r.versions)))}): {r.symptom}" for r in decision.reports
    ]
    asked = decision.question
    told.append(
        f"asked for: compute capability {asked.cc}, SGLang {asked.sglang}, FlashInfer {asked.flashinfer or 'of any version'}"
    )
    if decision.other_stacks:
        told.append(f"left out: {decision.other_stacks} records about backends of another GPU or other versions")
    expiry = decision.expires_with.items()
    told += [f"ask again when {name} is no longer {change['now']}: it decides {change['invalidates']}" for name, change in expiry]
    return told
