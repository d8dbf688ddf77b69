"""Log lines: key=value that splits again, JSON that parses, nothing a client sent can forge a line."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.log import JsonFormatter, KeyValueFormatter, event, setup


def record(message: str = "request finished", **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("inferserve.http", logging.INFO, __file__, 1, "%s", (message,), None)
    made.fields = fields
    return made


def text(message: str = "request finished", **fields: object) -> str:
    return KeyValueFormatter("http-0").format(record(message, **fields))


def test_line_has_time_level_process_message_and_fields() -> None:
    line = text(tokens=5, seconds=1.25, model="tiny")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    http-0       request finished tokens=5 seconds=1.25 model=tiny", line
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (True, "True"),
        (None, "None"),
        (0.1 + 0.2, "0.3"),
        (1e-9, "1e-09"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("a=b", '"a=b"'),
        ("é字", "é字"),
        ("a\nb", '"a\\nb"'),
        ("a\x00b", '"a\\u0000b"'),
        ("\x1b[31mred", '"\\u001b[31mred"'),
    ],
)
def test_values(value: object, shown: str) -> None:
    assert text(field=value).endswith(f" field={shown}")


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b", "\x00", "\x7f", "\x85", "\u2028", "\u202e"])
@pytest.mark.parametrize("where", ["message", "field"])
def test_no_control_character_reaches_the_terminal(control: str, where: str) -> None:
    hostile = f"a{control}12:00:00.000 ERROR   router       forged"
    line = text(hostile) if where == "message" else text(field=hostile)
    assert control not in line
    assert len(line.splitlines()) == 1


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=20), max_size=5))
def test_text_fields_can_be_read_back(fields: dict[str, str]) -> None:
    line = text("done", **fields)
    tail = line.partition(" done")[2]
    found = dict(re.findall(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)', tail))
    assert {k: json.loads(v) if v.startswith('"') else v for k, v in found.items()} == fields


@settings(max_examples=200, deadline=None)
@given(st.text(), st.dictionaries(st.text(min_size=1, max_size=8), st.text() | st.integers() | st.none(), max_size=4))
def test_json_lines_parse_and_keep_everything(message: str, fields: dict[str, object]) -> None:
    reserved = {"ts", "level", "process", "msg", "exception"}
    fields = {k: v for k, v in fields.items() if k not in reserved}
    made = record(message)
    made.fields = fields
    line = JsonFormatter("router").format(made)
    assert "\n" not in line
    body = json.loads(line)
    assert (body["level"], body["process"], body["msg"]) == ("info", "router", message)
    assert body["ts"] == pytest.approx(made.created)
    assert {k: body[k] for k in fields} == fields


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_is_strict_even_for_numbers_that_are_not(value: float) -> None:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(JsonFormatter("router").format(record(speed=value)), parse_constant=refuse)


def test_json_shows_odd_objects_as_text() -> None:
    body = json.loads(JsonFormatter("router").format(record(path=object)))
    assert "object" in body["path"]


@pytest.mark.parametrize("formatter", [KeyValueFormatter("x"), JsonFormatter("x")])
def test_exceptions_are_shown(formatter: logging.Formatter) -> None:
    made = record()
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        made.exc_info = sys.exc_info()
    assert "RuntimeError: broken" in formatter.format(made)


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What the process writes after `setup()`; loggers are put back afterwards."""
    root, package = logging.getLogger(), logging.getLogger("inferserve")
    before = (root.handlers[:], root.level, package.level)
    yield lambda: capsys.readouterr().err
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


def test_event_writes_fields_once(stderr: Callable[[], str]) -> None:
    setup("router")
    setup("router")  # again, as after a fork: still one line
    event(logging.getLogger("inferserve.router"), "100% full", queue=3)
    written = stderr()
    assert written.count("\n") == 1
    assert "100% full queue=3" in written


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels_are_ours_and_foreign_libraries_stay_quiet(stderr: Callable[[], str], level: str, lines: int) -> None:
    setup("router", level)
    for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        event(logging.getLogger("inferserve.router"), "said", severity)
    logging.getLogger("some.library").info("noise")
    written = stderr()
    assert written.count("said") == lines
    assert "noise" not in written


def test_json_format_by_setup(stderr: Callable[[], str]) -> None:
    setup("http-1", fmt="json")
    event(logging.getLogger("inferserve.http"), "request finished", x_request_id="a b", tokens=3)
    body = json.loads(stderr())
    assert body["process"] == "http-1"
    assert (body["x_request_id"], body["tokens"]) == ("a b", 3)


def test_fields_survive_a_shell() -> None:
    """`shlex.split` is what people cut such lines with."""
    assert "note=two words" in shlex.split(text(note="two words"))
