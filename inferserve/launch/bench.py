"""`inferserve bench NAME [flags]`: run a program of the repository's `benchmarks` folder, which packages do not contain.

Knows where a clone has that folder, and nothing of what is in it: each file that says how it is run is a command.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import NoReturn

from inferserve.config import env
from inferserve.errors import ConfigError

FOLDER = "benchmarks"
_CLONE = Path(__file__).parents[2]


def bench(arguments: list[str], roots: tuple[Path, ...] = ()) -> int:
    """Become the benchmark; what it prints and its exit status are its own.

    Args:
        roots: where the folder may be; by default here, and beside the package as in a clone.

    Raises ConfigError when there is no such folder or no such benchmark.
    """
    root = next((r for r in roots or (Path.cwd(), _CLONE) if (r / FOLDER / "schema.py").is_file()), None)
    if root is None:
        raise ConfigError("bench: the benchmarks are not part of the package; clone the repository and run it there")
    programs = _programs(root / FOLDER)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("inferserve bench NAME [flags]; `inferserve bench NAME --help` says more\n")
        print("\n".join(f"  {name:<18} {about}" for name, about in programs.items()))
        return 0
    name = arguments[0].replace("-", "_")
    if name in programs:
        _become(root, name, arguments[1:])
    raise ConfigError(f"bench {arguments[0]}: no such benchmark; there are {', '.join(programs)}")


def _become(root: Path, name: str, flags: list[str]) -> NoReturn:
    command = [sys.executable, "-m", f"{FOLDER}.{name}", *flags]
    os.execve(sys.executable, command, env.environment_with_path(root))


def _programs(folder: Path) -> dict[str, str]:
    """Name and first sentence of every file whose docstring names its own command."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if f"{FOLDER}.{path.stem}" in about or f"{FOLDER}/{path.name}" in about:
            found[path.stem] = about.splitlines()[0]
    return found
