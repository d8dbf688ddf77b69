"""Tiny trained tokenizers of every decoder family, written as model folders, and slots filled by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's not what they've said, isn't it?",
    "def main(argv): return [x ** 2 for x in range(10)]  # indented\n\n    if x:\n        pass",
    "Straße, naïve café, Ωμέγα, Привет мир, 你好世界, こんにちは, สวัสดีครับ, हिन्दी",
    "😀 😃 👩‍👩‍👧 🇩🇪 ABCDEFGHIJKL 0123456789 ... !!! ???",
] * 4

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "Hello world , isn't this nice ? It 's .",
    "unseen: ǅ 𝔘𝔫𝔦 ☃ \x00\x07\t\r\n é e\u0301",
    "<|im_start|>user\nhi<|im_end|> <s>x</s>",
]

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def _save(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(folder: Path) -> Path:
    """GPT-2 style BPE with chat markers; all 256 bytes are tokens, so any id sequence is possible."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜é mark｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(
        folder,
        tokenizer,
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": True,  # BPE must ignore it
            "chat_template": CHAT_TEMPLATE,
        },
    )


def sentencepiece(folder: Path) -> Path:
    """Llama-2 style: ▁ for spaces, byte fallback, one leading space stripped, bos added."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    trained = json.loads(tokenizer.to_str())
    words = list(trained["model"]["vocab"])
    vocab = {w: i for i, w in enumerate(words[:3] + [f"<0x{b:02X}>" for b in range(256)] + words[3:])}
    tokenizer.model = models.BPE(
        vocab=vocab,
        merges=[tuple(m) for m in trained["model"]["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False},
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": True,
        "legacy": True,
        "added_tokens_decoder": {
            str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
            for i, t in enumerate(["<unk>", "<s>", "</s>"])
        }
        | {
            str(len(vocab)): {
                "content": "<extra>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False, "special": False
            }
        },
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    }  # fmt: skip
    return _save(folder, tokenizer, settings)


def unigram(folder: Path) -> Path:
    """T5 style: unigram with Metaspace, whose spaces before punctuation are cleaned up."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder = _save(folder, tokenizer, {"clean_up_tokenization_spaces": False})
    names = {"eos_token": "</s>", "unk_token": {"content": "<unk>"}, "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text("from the file")
    return folder


def word_piece(folder: Path) -> Path:
    """BERT style, with a decoder that cleans up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(folder, tokenizer, {"unk_token": "[UNK]", "eos_token": "[SEP]", "sep_token": "[SEP]"})


def cleaning_unigram(folder: Path) -> Path:
    """As `unigram`, with transformers' clean-up of spaces switched on."""
    folder = unigram(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True})
    )
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "word_piece": word_piece,
    "cleaning_unigram": cleaning_unigram,
}
