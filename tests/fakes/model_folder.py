"""Tiny model folders, right and wrong in one way: config.json, tokenizer.json and safetensors of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 64
EOS = 2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "torch_dtype": "bfloat16",
}


def tokenizer(tokens: int = VOCAB) -> dict[str, Any]:
    """A word-level tokenizer.json with `tokens` ids, the first three special."""
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"w{i}" for i in range(tokens - len(special)))]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "special": True}
            | {"normalized": False}
            for i, text in enumerate(special)
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "<unk>"},
    }


def safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A file of zeros: tensor name to (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(at)


def embedding(rows: int = VOCAB) -> dict[str, tuple[str, list[int], int]]:
    """The embedding as the only tensor; enough for what is checked before the engine starts."""
    return {"model.embed_tokens.weight": ("BF16", [rows, 16], rows * 32)}


def write_model(folder: Path, *, rows: int = VOCAB, tokens: int = VOCAB, **config: Any) -> Path:
    """A folder that resolves; keyword arguments change config.json (None removes a key)."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {k: v for k, v in {**CONFIG, **config}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(tokens)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (folder / "model.safetensors").write_bytes(safetensors(embedding(rows)))
    return folder
