"""Every declared metric is emitted somewhere in the code of its role, and nothing undeclared is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from inferserve.metrics.names import Kind, declare
from inferserve.protocol.boot import ROLE_HTTP, ROLE_METRICS, ROLE_ROUTER

PACKAGE = Path(__file__).parents[3] / "inferserve"
CODE = {
    ROLE_HTTP: [*(PACKAGE / "http").rglob("*.py"), PACKAGE / "metrics" / "requests.py"],
    ROLE_ROUTER: [*(PACKAGE / "router").rglob("*.py")],
    ROLE_METRICS: [PACKAGE / "metrics" / "processes.py"],
}
TABLE = declare(100, 100)


def literals(role: str) -> set[str]:
    """All string constants in the code of `role`."""
    return {
        node.value
        for path in CODE[role]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("role", CODE)
def test_every_declared_metric_is_named_by_its_role(role: str) -> None:
    declared = {m.name for m in TABLE.values() if m.role == role}
    assert declared
    assert declared - literals(role) == set()


@pytest.mark.parametrize("role", CODE)
def test_calls_name_declared_metrics_of_the_right_kind(role: str) -> None:
    methods = {"add": Kind.COUNTER, "set": Kind.GAUGE, "observe": Kind.HISTOGRAM}
    for path in CODE[role]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods):
                continue
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner.lstrip("_") in ("client", "metrics") and isinstance(node.args[0], ast.Constant):
                metric = TABLE[node.args[0].value]
                assert (metric.role, metric.kind) == (role, methods[node.func.attr]), f"{path}:{node.lineno}"


def test_every_role_of_the_table_has_code() -> None:
    assert {m.role for m in TABLE.values()} == set(CODE)
