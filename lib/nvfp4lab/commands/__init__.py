"""One module per `nvfp4lab` subcommand, found by name and imported only when it is called.

A command module `commands/NAME.py` has a one-line docstring (its help), `add_arguments(parser)` and
`run(args) -> int` (the exit code). Heavy imports (torch, matplotlib) belong inside `run`.
"""
