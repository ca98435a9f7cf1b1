"""How long reading the facts of one SGLang takes, beside parsing everything and beside ripgrep, in one run.

    python bench/source.py [--sglang 0.5.23] [--rounds 3]

Each measurement is a process of its own, started the way a user starts it; the best of the rounds counts. `cold`: an
empty cache, the wheel on disk. `cached`: the same question again. `ast_parse_all`: `ast.parse` of every Python member.
`ripgrep`: a search for the words that the reader's prefilter uses, in the unpacked wheel (null where rg is missing).
The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from nvfp4lab.source.package import LAYOUTS, resolve

PARSE_ALL = """
import ast, sys, warnings, zipfile
warnings.simplefilter("ignore")
with zipfile.ZipFile(sys.argv[1]) as archive:
    trees = [ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")]
print(len(trees))
"""


def measure(command: list[str], **environment: str) -> tuple[float, float, str]:
    """(wall seconds, peak resident MiB, stderr) of one process. Raises RuntimeError when it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {said.strip()}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024, said


def facts(wheel: str, rounds: int) -> dict[str, float | int]:
    """Cold and cached time, peak memory and the reader's own counts."""
    cold, cached, peak, said = [], [], [], ""
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "nvfp4lab", "facts", "--sglang", wheel, "--json", f"{cache}/facts.json"]
            seconds, mib, said = measure(command, NVFP4LAB_CACHE=cache)
            cold.append(seconds)
            peak.append(mib)
            cached.append(measure(command, NVFP4LAB_CACHE=cache)[0])
    files_read, lines_parsed = (int(re.search(rf"(\d+) {words}", said)[1]) for words in ("files read", "lines parsed"))
    return {
        "cold_s": round(min(cold), 3),
        "cached_s": round(min(cached), 3),
        "peak_rss_mib": round(max(peak)),
        "files_read": files_read,
        "lines_parsed": lines_parsed,
    }


def ripgrep(wheel: str, rounds: int) -> float | None:
    """Seconds of one search for the prefilter's words in the unpacked wheel."""
    if shutil.which("rg") is None:
        return None
    words = [part for word in LAYOUTS["sglang"].words for part in ("-e", word.decode())]
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        return min(measure(["rg", "--no-ignore", "--count", "--fixed-strings", *words, folder])[0] for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang", default="0.5.23", help="version or wheel file")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    wheel = resolve(args.sglang).tree.origin
    row = facts(wheel, args.rounds)
    row["ast_parse_all_s"] = round(measure([sys.executable, "-c", PARSE_ALL, wheel])[0], 3)
    found = ripgrep(wheel, args.rounds)
    row["ripgrep_s"] = None if found is None else round(found, 3)
    print(f"{Path(wheel).name}: facts cold {row['cold_s']} s, cached {row['cached_s']} s, {row['peak_rss_mib']} MiB")
    print(f"  ast.parse of everything {row['ast_parse_all_s']} s; ripgrep {row['ripgrep_s'] or 'not installed'}")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
