"""Rules of the house that neither ruff, mypy nor import-linter can see. Each walks the syntax trees of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inferserve"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
EVERYWHERE = [
    p for folder in ("inferserve", "benchmarks", "scripts", "tests") for p in sorted((ROOT / folder).rglob("*.py"))
]

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "send_pyobj", "recv_pyobj", "obtain"}
MEANINGLESS = re.compile(r"^(utils?|common|misc|helpers?|impl|base_.*|.*_utils?)$")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ATTRIBUTES = 12


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Each call with the dotted text of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def users_of(module: str) -> set[str]:
    """Package files that import `module`."""
    return {name_of(p) for p, t in TREES.items() if any(i == module or i.startswith(module + ".") for i in imports(t))}


@pytest.mark.parametrize("path", EVERYWHERE, ids=name_of)
def test_no_unsafe_deserialisation(path: Path) -> None:
    tree = ast.parse(path.read_text())
    traps = {"tests/conftest.py"}  # imports pickle in order to disarm it
    assert name_of(path) in traps or not [i for i in imports(tree) if i.split(".")[0] in FORBIDDEN_MODULES]
    for node, called in calls(tree):
        keywords = {k.arg for k in node.keywords}
        assert (
            called.split(".")[-1] not in FORBIDDEN_CALLS
            or called.endswith(("re.compile", "model.eval", ").eval"))
            or (called.endswith(".eval") and not node.args)
        ), f"{called} at line {node.lineno}"
        assert called not in ("torch.load", "yaml.load"), f"{called} at line {node.lineno}"
        assert "allow_pickle" not in keywords, f"allow_pickle at line {node.lineno}"


def test_environment_is_read_in_config_only() -> None:
    bad = [
        f"{name_of(p)}:{node.lineno}"
        for p, tree in TREES.items()
        if p.parent != PACKAGE / "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert not bad


def test_zmq_is_used_in_transport_and_at_the_process_border_only() -> None:
    border = {"inferserve/process.py", "inferserve/launch/serve.py"}
    assert {u for u in users_of("zmq") if not u.startswith("inferserve/transport/")} <= border


def test_shared_memory_is_mapped_in_shm_only() -> None:
    reads_a_file = {"inferserve/config/gguf_header.py"}
    assert users_of("mmap") - reads_a_file == {"inferserve/shm/segment.py"}
    assert not users_of("multiprocessing")


def test_nothing_polls() -> None:
    """Waiting is on a socket or an event with a deadline; `sleep` has one home each for backoff and the fake step."""
    bad = [
        f"{name_of(p)}:{node.lineno}"
        for p, tree in TREES.items()
        if name_of(p) not in {"inferserve/engine/fake.py"}
        for node, called in calls(tree)
        if called in ("time.sleep", "asyncio.sleep") and not (node.args and ast.unparse(node.args[0]) == "0")
    ]
    assert not bad


def test_intervals_use_the_monotonic_clock() -> None:
    """Wall time only where a person or a protocol asks for it: log stamps, `created`, start times of lock files."""
    allowed = (
        "inferserve/log.py",
        "inferserve/http/",
        "inferserve/launch/",
        "inferserve/tokenize/chat.py",
        "inferserve/metrics/",
    )
    bad = [
        f"{name_of(p)}:{node.lineno}"
        for p, tree in TREES.items()
        if not name_of(p).startswith(allowed)
        for node, called in calls(tree)
        if called == "time.time"
    ]
    assert not bad


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_module_has_a_name_and_a_docstring(path: Path) -> None:
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    assert not MEANINGLESS.match(stem)
    doc = ast.get_docstring(TREES[path])
    assert doc and len(doc) > 15


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    kernel = "kernels" in path.parts
    lines = len(path.read_text().splitlines())
    assert kernel or lines <= MAX_FILE_LINES, f"{lines} lines"
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert kernel or length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_classes_hold_few_attributes(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.ClassDef):
            continue
        init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
        if init is None:
            continue
        names = {
            ast.unparse(target)
            for statement in ast.walk(init)
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if isinstance(target, ast.Attribute) and ast.unparse(target).startswith("self.")
        }
        assert len(names) <= MAX_ATTRIBUTES, f"{node.name}: {len(names)} attributes"


def test_no_module_level_mutable_state() -> None:
    """A module-level list, dict or set is a constant: upper case or private upper case, and never changed in functions."""
    bad = []
    for path, tree in TREES.items():
        for node in tree.body:
            value = getattr(node, "value", None)
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            for target in targets:
                if (
                    mutable
                    and isinstance(target, ast.Name)
                    and not target.id.lstrip("_").isupper()
                    and target.id != "__all__"
                ):
                    bad.append(f"{name_of(path)}: {target.id}")
        bad += [f"{name_of(path)}: global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not bad


def test_every_kernel_has_a_twin_and_a_test() -> None:
    bare = {"__init__", "dispatch", "launch_config", "logit_pieces", "kv_quant", "paged_kv"}
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        if path.stem in bare:
            continue
        public = [n for n in TREES[path].body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
        # What Triton compiles is a part of kernels, in this file or another.
        functions = {n.name for n in public if not any("triton.jit" in ast.unparse(d) for d in n.decorator_list)}
        ops = {f for f in functions if not f.endswith("_ref")}
        assert ops, f"{path.stem}: no op"
        assert {op + "_ref" for op in ops} <= functions, f"{path.stem}: an op without its twin"
        assert (ROOT / "tests" / "kernels" / f"test_{path.stem}.py").exists(), f"{path.stem}: no test"


def test_a_model_family_is_data() -> None:
    """A family file has a spec and a weight table; only the stack and the generic backend have a forward."""
    stack = {"decoder", "generic", "spec", "weights", "gguf_weights", "registry", "__init__"}
    for path in sorted((PACKAGE / "models").glob("*.py")):
        if path.stem.split("_")[0] in stack or path.stem in stack:
            continue
        names = {n.name for n in ast.walk(TREES[path]) if isinstance(n, ast.FunctionDef)}
        assert "forward" not in names, path.stem
        assert len(path.read_text().splitlines()) <= 150, path.stem
