"""Runs SGLang's own serving benchmark once for every line of arguments on stdin, in one interpreter.

Run as a script in the environment that has SGLang: `python load_driver.py LOG`. Importing SGLang takes 10 to 25 s and
more than most rows; here it is paid once. Each line in is a JSON list of the benchmark's own command-line arguments,
each line out a JSON object {"exit": code}; what the benchmark prints goes to LOG. Results are in the --output-file.
"""

import importlib.util
import json
import os
import runpy
import sys

NAMES = ("sglang.benchmark.serving", "sglang.bench_serving")  # from 0.5.15 on, and before


def module_name() -> str:
    """The benchmark's module in the SGLang that is installed."""
    for name in NAMES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # its parent package does not exist in this version
            continue
    raise ModuleNotFoundError(f"none of {', '.join(NAMES)} is installed")


def run(name: str, arguments: list[str]) -> int:
    """One run of the benchmark as if from the command line; its exit code, 1 for an exception (which is in the log)."""
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main(log: str) -> None:
    """Answer until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    name = module_name()
    for line in sys.stdin:
        replies.write(json.dumps({"exit": run(name, json.loads(line))}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
