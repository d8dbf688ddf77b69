"""Flags: spelling, types, files, help, and what wrong ones are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferserve.config import cli
from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError


def _problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)
    return caught.value.problems


def test_no_flags_are_the_schema_s_defaults() -> None:
    assert cli.parse([]).settings == ServerConfig()


@pytest.mark.parametrize("spelling", ["--max-req-total-len", "--max_req_total_len", "--max_req-total_len"])
def test_dash_and_underscore_are_the_same(spelling: str) -> None:
    assert cli.parse([spelling, "77"]).settings.model.max_req_total_len == 77
    assert cli.parse([f"{spelling}=77"]).settings.model.max_req_total_len == 77


def test_values_keep_their_underscores() -> None:
    assert cli.parse(["--model_dir=/a_b/c_d"]).settings.model.model_dir == "/a_b/c_d"


def test_every_flag_is_accepted_and_lands_in_its_part() -> None:
    for name, flag in cli.flags().items():
        if flag.kind is bool:
            argv, value = [("--no-" if flag.default else "--") + name.replace("_", "-")], not flag.default
        elif flag.choices:
            argv, value = [flag.option, flag.choices[-1]], flag.choices[-1]
        elif flag.is_list:
            argv, value = [flag.option, "3", "4"], (3, 4)
        else:
            argv, value = [flag.option, "1"], flag.kind("1")
        assert getattr(getattr(cli.parse(argv).settings, flag.part), name) == value, name


def test_lists_take_spaces_and_commas() -> None:
    assert cli.parse(["--eos-id", "1", "2,3"]).settings.model.eos_id == (1, 2, 3)


def test_negative_numbers_are_values() -> None:
    assert cli.parse(["--pipeline-depth", "-1"]).settings.engine.pipeline_depth == -1


def test_lightllm_s_model_name_is_ours() -> None:
    assert cli.parse(["--model_name", "x"]).settings.model.served_model_name == "x"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--prt", "8"], "unknown flag --prt; did you mean --port?"),
        (["--batch_max_token", "8"], "unknown flag --batch-max-token; did you mean --batch-max-tokens?"),
        (["--zzzzzzzz=1"], "unknown flag --zzzzzzzz"),
        (["--bogus", "1"], "unknown flag --bogus"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--port", "1.5"], "--port: '1.5' is not a whole number"),
        (["--mem-fraction", "much"], "--mem-fraction: 'much' is not a number"),
        (["--engine", "onnx"], "--engine: 'onnx' is not one of torch, fake"),
        (["--port"], "--port: expected one argument"),
        (["--eos-id", "a"], "--eos-id: 'a' is not a whole number"),
        (["model"], "unexpected argument 'model'; a model is given with --model-dir"),
        (["--foreground", "nobody"], "--foreground nobody: not one of http, router, engine, detokenize, metrics"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
    ],
)
def test_one_line_names_the_problem(argv: list[str], line: str) -> None:
    assert _problems(*argv) == (line,)


def test_all_problems_are_told_at_once() -> None:
    found = _problems("--prt", "1", "--port", "x", "--engine", "y")
    assert len(found) == 3


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_sets_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 9000\nmax-n: 3\nwarmup: false\neos_id: [1, 2]\nmem_fraction: 0.5\nhost: ::1\n")
    settings = cli.parse(["--config", path, "--port", "1"]).settings
    assert settings.http.port == 1 and settings.http.max_n == 3 and settings.http.host == "::1"
    assert settings.model.eos_id == (1, 2) and not settings.engine.warmup and settings.engine.mem_fraction == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prt: 1", "unknown key 'prt'; did you mean port?"),
        ("port: high", "port: 'high' is not a whole number"),
        ("port: true", "port: True is not a whole number"),
        ("warmup: 1", "warmup: 1 is not true or false"),
        ("served_model_name: 7", "served_model_name: 7 is not text"),
        ("[1, 2]", "expected a mapping of flag names to values"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_files_are_read_strictly(tmp_path: Path, text: str, says: str) -> None:
    path = _file(tmp_path, text)
    (problem,) = _problems("--config", path)
    assert problem.startswith(f"--config {path}: ") and says in problem


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert cli.parse(["--config", _file(tmp_path, "")]).settings == ServerConfig()


def test_help_is_grouped_and_names_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for title in cli.part_titles().values():
        assert f"\n{title}:\n" in text
    for flag in cli.flags().values():
        assert flag.option in text
    assert "default: 8000" in text and "demo model" in text


def test_the_shown_configuration_marks_what_was_changed() -> None:
    shown = cli.show(cli.parse(["--port", "5"]).settings).splitlines()
    assert any(line.split() == ["*", "port", "5"] for line in shown)
    assert any(line.split() == ["max-n", "16"] for line in shown)
