"""From argv and `--config` files to a `ServerConfig` that still holds "auto" values.

Flags, their types and their help come from the field metadata of `schema.py`; nothing is declared here a second time.
Values of files and of the command line go through the same conversion, so both are equally strict. Knows no model and
imports nothing heavy: a wrong flag is answered in the time Python takes to start.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError
from inferserve.protocol.boot import ROLES

# Names of LightLLM that mean one of ours.
ALIASES = {"model_name": "served_model_name"}
_FACTS = "facts"


@dataclass(frozen=True)
class Flag:
    """One setting: `part` is the attribute of ServerConfig that holds it, `kind` its type."""

    part: str
    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str
    auto: str

    @property
    def option(self) -> str:
        """As it is written in messages: `--max-req-total-len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """True when the flag takes several values."""
        return typing.get_origin(self.kind) is tuple


def flags() -> dict[str, Flag]:
    """Every flag by its name with underscores, in the order of the schema."""
    found: dict[str, Flag] = {}
    for part, part_type in typing.get_type_hints(ServerConfig).items():
        if part == _FACTS:
            continue
        kinds = typing.get_type_hints(part_type)
        for f in dataclasses.fields(part_type):
            found[f.name] = Flag(part=part, name=f.name, kind=kinds[f.name], default=f.default, **f.metadata)
    return found


def part_titles() -> dict[str, str]:
    """Part name to the heading under which its flags are shown."""
    hints = typing.get_type_hints(ServerConfig)
    return {part: (kind.__doc__ or part).strip() for part, kind in hints.items() if part != _FACTS}


# ------------------------------------------------------------------------------------------------------ conversion


def convert(flag: Flag, value: object) -> object:
    """`value` (text from argv, or a YAML value) as the flag's type. Raises ValueError saying what was expected."""
    if flag.is_list:
        items = value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else [value]
        return tuple(_scalar(int, part) for item in items for part in _split(item))
    converted = _scalar(flag.kind, value)
    if flag.choices and converted not in flag.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(flag.choices)}")
    return converted


def _split(item: object) -> list[object]:
    return [p for p in item.split(",") if p.strip()] if isinstance(item, str) else [item]


def _scalar(kind: type, value: object) -> object:
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{value!r} is not true or false")
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{value!r} is not text")
    what = "a whole number" if kind is int else "a number"
    accepted = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError(f"{value!r} is not {what}")
    try:
        return int(value) if kind is int else float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not {what}") from None


def _suggest(name: str, known: Sequence[str]) -> str:
    # Without dashes: two that all flags share would make any short word look like any other.
    bare = {each.lstrip("-"): each for each in known}
    near = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def read_file(path: str) -> dict[str, object]:
    """Settings of a `--config` file: a flat YAML mapping of flag names. Raises ConfigError naming file and key."""
    import yaml  # only when a file is given

    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected a mapping of flag names to values")
    return _typed(loaded, f"--config {path}: ")


def _typed(values: Mapping[Any, object], origin: str = "") -> dict[str, object]:
    """Converted values by flag name; raises one ConfigError with every unknown key and wrong value."""
    table, problems = flags(), []
    out: dict[str, object] = {}
    for key, value in values.items():
        name = str(key).lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in table:
            problems.append(f"{origin}unknown key {str(key)!r}{_suggest(name, list(table))}")
            continue
        try:
            out[name] = convert(table[name], value)
        except ValueError as error:
            problems.append(f"{origin}{table[name].option if not origin else key}: {error}")
    if problems:
        raise ConfigError(*problems)
    return out


# ----------------------------------------------------------------------------------------------------- the parser


@dataclass(frozen=True)
class Invocation:
    """What the command line asked for: the settings, and the role to keep on the terminal ('' for none)."""

    settings: ServerConfig
    foreground: str = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of `inferserve COMMAND`, with one group for each part of the schema. All values stay text."""
    width = argparse.HelpFormatter("")._width
    built = _Parser(
        prog=f"inferserve {command}",
        usage=f"inferserve {command} [--model-dir MODEL] [flags]",
        description="'-' and '_' are the same in flag names. Every flag can be a key of a --config file.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=min(120, width)),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    general = built.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="show this and exit")
    general.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins over it")
    if command == "serve":
        text = f"run this process under the terminal, for a debugger ({', '.join(ROLES)})"
        general.add_argument("--foreground", metavar="ROLE", help=text)
    groups = {part: built.add_argument_group(title) for part, title in part_titles().items()}
    for item in flags().values():
        _add(groups[item.part], item)
    for alias, name in ALIASES.items():
        built.add_argument("--" + alias.replace("_", "-"), dest=name, help=argparse.SUPPRESS)
    return built


def _add(group: argparse._ArgumentGroup, item: Flag) -> None:
    text = item.help.replace("%", "%%") + f" ({_default_text(item)})"
    if item.kind is bool and item.default:
        group.add_argument(item.option, dest=item.name, action=argparse.BooleanOptionalAction, help=text)
        return
    if item.kind is bool:
        group.add_argument(item.option, dest=item.name, action="store_true", help=text)
        negative = item.option.replace("--", "--no-", 1)
        group.add_argument(negative, dest=item.name, action="store_false", help=argparse.SUPPRESS)
        return
    metavar = item.metavar or {int: "N", float: "X"}.get(item.kind, "TEXT")
    if item.choices:
        metavar = "{" + ",".join(item.choices) + "}"
    group.add_argument(item.option, dest=item.name, metavar=metavar, nargs="+" if item.is_list else None, help=text)


def _default_text(item: Flag) -> str:
    if item.auto:
        return f"default: {item.auto}".replace("%", "%%")
    if item.kind is bool:
        return "default: on" if item.default else "default: off"
    return f"default: {item.default if item.default != '' else 'none'}".replace("%", "%%")


def _dashes(argv: Sequence[str]) -> list[str]:
    """`--max_req_total_len=5` → `--max-req-total-len=5`; values stay as they are."""
    out = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            token = name.replace("_", "-") + equals + value
        out.append(token)
    return out


def parse(argv: Sequence[str], command: str = "serve") -> Invocation:
    """Settings from `argv` over `--config` over the defaults. Raises ConfigError with every problem it can name.

    Args:
        argv: arguments after the command.
        command: for --help; only `serve` takes --foreground.
    """
    namespace, left_over = parser(command).parse_known_args(_dashes(argv))
    given: dict[str, Any] = vars(namespace)
    problems = _unknown(left_over)
    foreground = given.pop("foreground", "")
    if foreground and foreground not in ROLES:
        problems.append(f"--foreground {foreground}: not one of {', '.join(ROLES)}")
    values: dict[str, object] = {}
    file = given.pop("config", None)
    sources: list[Callable[[], dict[str, object]]] = [lambda: _typed(given)]
    if file:
        sources.insert(0, lambda: read_file(file))
    for source in sources:
        try:
            values.update(source())
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return Invocation(build(values), foreground)


def _unknown(left_over: Sequence[str]) -> list[str]:
    """One line for each flag that does not exist, or for stray words when there is none."""
    known = ["--" + n.replace("_", "-") for n in flags()] + ["--config", "--foreground"]
    names = [token.split("=")[0] for token in left_over if token.startswith("-")]
    if names:
        return [f"unknown flag {name}{_suggest(name, known)}" for name in names]
    return [f"unexpected argument {word!r}; a model is given with --model-dir" for word in left_over[:1]]


def build(values: Mapping[str, object]) -> ServerConfig:
    """A ServerConfig from converted values by flag name; what is not named keeps its default."""
    table = flags()
    by_part: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_part.setdefault(table[name].part, {})[name] = value
    base = ServerConfig()
    changes: dict[str, Any] = {part: dataclasses.replace(getattr(base, part), **v) for part, v in by_part.items()}
    return dataclasses.replace(base, **changes)


def show(config: ServerConfig) -> str:
    """The configuration as text, grouped as in --help; what differs from the default is marked with `*`."""
    lines: list[str] = []
    table = flags()
    for part, title in part_titles().items():
        lines.append(f"{title}:")
        for item in (f for f in table.values() if f.part == part):
            value = getattr(getattr(config, part), item.name)
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            lines.append(f"  {'*' if value != item.default else ' '} {item.option[2:]:<30} {text}")
    lines.append("Model facts:")
    for f in dataclasses.fields(config.facts):
        lines.append(f"    {f.name:<30} {getattr(config.facts, f.name)}")
    return "\n".join(lines)
