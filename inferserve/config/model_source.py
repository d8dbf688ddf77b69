"""Finding a model: `--model-dir` as folder, .gguf file, hub id or nothing, to files on this disk.

A GGUF's tokenizer and config are converted once, by a subprocess that may import what it likes, into the cache under
a key of the file's identity. Checks nothing about the contents beyond what finding them needs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inferserve.config import demo, env
from inferserve.config.gguf_header import GgufHeader, file_digest, read_header
from inferserve.config.machine import interpreter
from inferserve.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_HUB_TIMEOUT_S = 5.0
# Raised when gguf_convert.py changes what it writes.
CONVERTER_VERSION = "inferserve-gguf-1"
CONVERTED_MARK = "converted.json"

Report = Callable[[str], None]


@dataclass(frozen=True)
class ModelSource:
    """A model on disk: `folder` has config.json and the tokenizer; `gguf` and `header` when weights are in a .gguf."""

    folder: Path
    name: str
    gguf: Path | None = None
    header: GgufHeader | None = None


def is_local(model_dir: str) -> bool:
    """True when `model_dir` can only mean a path, so that a missing one is an error and not a hub id."""
    path = Path(model_dir).expanduser()
    if path.exists() or model_dir.endswith(".gguf") or model_dir.startswith(("/", ".", "~")):
        return True
    return not _HUB_ID.fullmatch(model_dir) or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())


def check_path(model_dir: str) -> list[str]:
    """Problems of a local `--model-dir` that show without reading it; [] for a hub id or the demo model."""
    if not model_dir or not is_local(model_dir):
        return []
    path = Path(model_dir).expanduser()
    if not path.exists():
        return [f"--model-dir {model_dir}: no such file or folder"]
    if path.is_file() and path.suffix != ".gguf":
        return [f"--model-dir {model_dir}: neither a folder nor a .gguf file"]
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; name the file in it: {path / inside[0]}" if inside else ""
        return [f"--model-dir {model_dir}: no config.json in the folder{hint}"]
    return []


def locate(model_dir: str, report: Report) -> ModelSource:
    """The model's files, fetched or converted where needed.

    Args:
        model_dir: the flag's value; '' for the demo model.
        report: called with a line before something that takes seconds.
    """
    if not model_dir:
        return _gguf(demo.demo_model(), demo.NAME, report)
    problems = check_path(model_dir)
    if problems:
        raise ConfigError(*problems)
    if not is_local(model_dir):
        return ModelSource(_download(model_dir, report), model_dir.rpartition("/")[2])
    path = Path(model_dir).expanduser().resolve()
    if path.is_file():
        return _gguf(path, path.stem, report)
    return ModelSource(path, path.name)


def _download(repository: str, report: Report) -> Path:
    """A snapshot of a hub repository (from the hub's own cache when it is there); its progress bars go to stderr."""
    from huggingface_hub import snapshot_download  # takes a third of a second, for hub ids only

    report(f"fetching {repository} from the hub")
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the client raises its own, its transport's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"--model-dir {repository}: no such folder here, and it could not be fetched from the hub ({reason})"
        ) from error


def _gguf(path: Path, name: str, report: Report) -> ModelSource:
    header = read_header(path)
    folder = env.cache_dir() / "gguf" / file_digest(path, CONVERTER_VERSION)
    if not (folder / CONVERTED_MARK).is_file():
        report(f"converting tokenizer and config of {path.name} (once)")
        convert(path, folder)
    return ModelSource(folder, name, path, header)


def convert(path: Path, folder: Path) -> None:
    """Run the converter on `path`; `folder` appears whole or not at all. Raises ConfigError with its last line."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder.parent}: cannot create the cache directory ({error.strerror})") from error
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        command = [*interpreter(), "-m", "inferserve.tokenize.gguf_convert", str(path), str(written)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            raise ConfigError(f"{path}: tokenizer and config cannot be read from the GGUF file: {lines[-1]}")
        try:
            written.rename(folder)
        except OSError:
            # Another launcher was faster: its result is as good. Anything else is a real failure.
            if not (folder / CONVERTED_MARK).is_file():
                raise
