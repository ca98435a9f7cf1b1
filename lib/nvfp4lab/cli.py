"""`nvfp4lab COMMAND ...`: finds the command's module, parses, runs it, turns LabError into one line."""

import argparse
import ast
import errno
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nvfp4lab import __version__, commands
from nvfp4lab.errors import LabError

# What the file system refuses. Anything else that fails is a fault of ours and keeps its traceback.
REFUSED = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)


def command_names() -> list[str]:
    """Names of all subcommands, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


def _summary(name: str) -> str:
    """First docstring line of a command module, read without importing it (an import may cost seconds)."""
    source = (Path(commands.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """The parser with every command listed and the arguments of `wanted` filled in."""
    parser = argparse.ArgumentParser(prog="nvfp4lab", description="Which NVFP4 backends are right, fast, or broken here?")
    parser.add_argument("--version", action="version", version=f"nvfp4lab {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in command_names():
        sub = subparsers.add_parser(name, help=_summary(name), description=_summary(name))
        if name == wanted:
            module = importlib.import_module(f"nvfp4lab.commands.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0 sound, 1 failure, 2 resumable or usage, 3 the machine's fault)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    args = build_parser(wanted).parse_args(argv)
    try:
        return args.run(args)
    except LabError as error:
        print(f"nvfp4lab {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        print(f"nvfp4lab {args.command}: {f'{error.filename}: ' if error.filename else ''}{error.strerror}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"nvfp4lab {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
