"""The `inferserve` command: serve, check, env, bench. Imports only what a wrong flag needs to be named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from inferserve import __version__
from inferserve.config import cli
from inferserve.errors import ConfigError
from inferserve.launch.signals import Interrupted, Signals

_USAGE = """\
inferserve: serve large language models over HTTP

  inferserve serve [flags]     run the server (no flags: the demo model on http://127.0.0.1:8000)
  inferserve check [flags]     resolve the same flags, print the configuration; exit 0 if it would start, 2 if not
  inferserve env               print what a bug report needs
  inferserve bench [NAME]      run a benchmark of the repository; without NAME: list them

`inferserve serve --help` lists the flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (0 fine, 2 configuration, 70 a process died)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "check": _check, "env": _env, "bench": _bench}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    try:
        if arguments[0] not in commands:
            raise ConfigError(f"unknown command {arguments[0]!r}; there are {', '.join(commands)}")
        return commands[arguments[0]](arguments[1:])
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2


def _serve(arguments: list[str]) -> int:
    with Signals() as signals:
        try:
            # After the signal handlers, and after the flags are known to be right: numpy and ZMQ take a moment.
            invocation = cli.parse(arguments, "serve")
            from inferserve.launch.serve import serve

            return serve(invocation, signals)
        except Interrupted as signal:
            print(f"stopped by {signal} before anything was started", file=sys.stderr)
            return 0


def _check(arguments: list[str]) -> int:
    invocation = cli.parse(arguments, "check")
    from inferserve.config.resolve import resolve
    from inferserve.launch.memory import check_memory

    config = resolve(invocation.settings)
    check_memory(config)
    print(cli.show(config))
    return 0


def _env(arguments: list[str]) -> int:
    if arguments:
        raise ConfigError(f"env takes no arguments, got {arguments[0]!r}")
    from inferserve.launch.environment import describe

    print(describe())
    return 0


def _bench(arguments: list[str]) -> int:
    from inferserve.launch.bench import bench

    return bench(arguments)
