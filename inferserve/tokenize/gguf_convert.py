"""`python -m inferserve.tokenize.gguf_convert FILE FOLDER`: what a GGUF says of tokenizer and config, as HF files.

Runs once a file, in a process of its own, because transformers reads GGUF tokenizers only with torch loaded. The result
is compared with the GGUF before it is written: a tokenizer that is subtly wrong would serve subtly wrong text for ever.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

from inferserve.config.gguf_header import GgufHeader, read_header
from inferserve.config.model_source import CONVERTED_MARK, CONVERTER_VERSION

# Vocabularies trained on single digits; transformers knows no split for their names (llama.cpp: llama-vocab.cpp).
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PR_SET_PDEATHSIG = 1
_PROBE = "Hello, world!  It's 2024.\n\tdef f(x):\n        return x  # caf\u00e9 \u4f60\u597d \U0001f642"


class ConversionFailed(Exception):
    """The converted files would not behave as the GGUF says."""


def convert(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json of `path` into `folder`."""
    from transformers import AutoConfig, AutoTokenizer

    header = read_header(path)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    _fix_split(tokenizer, header)
    _fix_ends(tokenizer, header)
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    _check(tokenizer, header)
    folder.mkdir()
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    config.save_pretrained(str(folder))
    _complete_config(folder / "config.json", header)
    _write(folder / "generation_config.json", _generation_config(header))
    _write(folder / CONVERTED_MARK, {"converter": CONVERTER_VERSION, "file": path.name})


def _write(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _fix_split(tokenizer: Any, header: GgufHeader) -> None:
    if header.metadata.get("tokenizer.ggml.pre") not in _SINGLE_DIGITS:
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _fix_ends(tokenizer: Any, header: GgufHeader) -> None:
    """The file's bos and eos, which some releases of transformers replace by the base class's defaults."""
    for name in ("bos_token", "eos_token"):
        said = header.metadata.get(f"tokenizer.ggml.{name}_id")
        if said is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(said)))


def _complete_config(path: Path, header: GgufHeader) -> None:
    """Facts that the GGUF states and a converted config may lack."""
    body = json.loads(path.read_text(encoding="utf-8"))
    if not body.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(body.get("model_type", ""))
        body["architectures"] = [name] if isinstance(name, str) else []
    body["tie_word_embeddings"] = "output.weight" not in header.shapes
    _write(path, body)


def _generation_config(header: GgufHeader) -> dict[str, Any]:
    keys = [f"tokenizer.ggml.{key}" for key in _END_KEYS]
    ends = list(dict.fromkeys(header.metadata[k] for k in keys if k in header.metadata))
    body: dict[str, Any] = {"eos_token_id": ends}
    if "tokenizer.ggml.bos_token_id" in header.metadata:
        body["bos_token_id"] = header.metadata["tokenizer.ggml.bos_token_id"]
    return body


def _check(tokenizer: Any, header: GgufHeader) -> None:
    """Compare the tokenizer with the GGUF's own statements. Raises ConversionFailed."""
    said = header.metadata
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        expected, actual = said.get(f"tokenizer.ggml.{key}"), getattr(tokenizer, name)
        if expected is not None and expected != actual:
            raise ConversionFailed(f"{name} is {actual}, the file says {expected}")
    template = said.get("tokenizer.chat_template")
    if template is not None and tokenizer.chat_template != template:
        raise ConversionFailed("the chat template was not kept")
    count = said.get("tokenizer.ggml.tokens", 0)
    if len(tokenizer) > int(count):
        raise ConversionFailed(f"the tokenizer has {len(tokenizer)} tokens, the file {count}")
    back = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False), skip_special_tokens=False)
    if back.strip() != _PROBE:
        raise ConversionFailed(f"text does not survive encoding and decoding: {back!r}")
    for token in {t for t in tokenizer.all_special_tokens if t}:
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise ConversionFailed(f"the special token {token!r} is cut into pieces")


def main() -> int:
    """Entry point; problems are one line on stderr. Dies with the launcher that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # the border of the process: whatever transformers raises is one line for the launcher
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
