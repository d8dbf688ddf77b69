"""`load_tokenizer` against transformers, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferserve.config.schema import ModelFacts, ModelPart, ServerConfig
from inferserve.errors import ConfigError
from inferserve.tokenize.load import PythonTokenizer, Tokenizer, check_tokenizer, load_tokenizer
from tests.fakes.tiny_tokenizers import CHAT_TEMPLATE, MAKERS, TEXTS


def _config(folder: Path, **model: Any) -> ServerConfig:
    return ServerConfig(model=ModelPart(**model), facts=ModelFacts(folder=str(folder)))


def _reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", MAKERS)
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    folder = MAKERS[kind](tmp_path)
    ours, theirs = load_tokenizer(_config(folder)), _reference(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.special_ids >= set(theirs.all_special_ids)
    for text in [*TEXTS, " ".join(TEXTS) * 4]:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_added_tokens_of_the_settings(tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json knows are added, and its flags win over those of tokenizer.json."""
    folder = MAKERS["byte_level"](tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    settings["added_tokens_decoder"] = {"1": {"content": "<|im_start|>", "special": False, **flags}}
    settings["extra_special_tokens"] = ["<tool>"]
    settings["sep_token"] = "<sep>"
    path.write_text(json.dumps(settings))
    ours, theirs = load_tokenizer(_config(folder)), _reference(folder)
    assert ours.vocab_size == len(theirs)
    text = "<|im_start|>a<tool>b<sep>c"
    assert ours.encode(text) == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == theirs.decode(theirs.encode(text), skip_special_tokens=skip)


def test_named_token_without_embedding_is_left_out(tmp_path: Path) -> None:
    """A pad token that is in no vocabulary and no embedding: common in fine-tunes, harmless."""
    folder = MAKERS["byte_level"](tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<pad>"}))
    size = load_tokenizer(_config(folder)).vocab_size - 1
    tokenizer = load_tokenizer(ServerConfig(facts=ModelFacts(folder=str(folder), vocab_size=size)))
    check_tokenizer(tokenizer, ModelFacts(vocab_size=size))
    assert tokenizer.special_tokens_map["pad_token"] == "<pad>"
    assert max(tokenizer.encode("<pad>")) < size


def test_chat_template(tmp_path: Path) -> None:
    assert load_tokenizer(_config(MAKERS["byte_level"](tmp_path / "a"))).chat_template == CHAT_TEMPLATE
    assert load_tokenizer(_config(MAKERS["sentencepiece"](tmp_path / "b"))).chat_template == "D"
    assert load_tokenizer(_config(MAKERS["unigram"](tmp_path / "c"))).chat_template == "from the file"
    assert load_tokenizer(_config(MAKERS["word_piece"](tmp_path / "d"))).chat_template is None
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    assert load_tokenizer(_config(tmp_path / "b", chat_template=str(own))).chat_template == "mine"
    with pytest.raises(ConfigError, match="--chat-template"):
        load_tokenizer(_config(tmp_path / "b", chat_template=str(tmp_path / "absent")))


def test_eos_id_flag_wins(tmp_path: Path) -> None:
    folder = MAKERS["byte_level"](tmp_path)
    assert load_tokenizer(_config(folder, eos_id=(7, 9))).eos_ids == (7, 9)


def test_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    folder = MAKERS["byte_level"](tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert load_tokenizer(_config(folder)).decode(load_tokenizer(_config(folder)).encode(TEXTS[0])) == TEXTS[0]


def test_no_torch(tmp_path: Path) -> None:
    folder = MAKERS["sentencepiece"](tmp_path)
    code = (
        "import sys\n"
        "from inferserve.config.schema import ModelFacts, ServerConfig\n"
        "from inferserve.tokenize.load import load_tokenizer\n"
        f"load_tokenizer(ServerConfig(facts=ModelFacts(folder={str(folder)!r}))).encode('x')\n"
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folder_without_tokenizer_json(tmp_path: Path) -> None:
    """Falls back to transformers: here a BERT vocabulary file."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = load_tokenizer(_config(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello world", add_special_tokens=False)) == "hello world"
    with pytest.raises(ConfigError, match=r"--tokenizer-mode fast needs .*tokenizer\.json"):
        load_tokenizer(_config(tmp_path, tokenizer_mode="fast"))


def test_python_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that comes as Python code runs only with --trust-remote-code."""
    (tmp_path / "letters.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        "class Letters(PreTrainedTokenizer):\n"
        "    vocab_files_names = {}\n"
        "    def __init__(self, **kw):\n"
        "        self._letters = '.abcdefghijklmnopqrstuvwxyz'\n"
        "        super().__init__(**kw)\n"
        "    @property\n"
        "    def vocab_size(self): return 27\n"
        "    def get_vocab(self): return {c: i for i, c in enumerate(self._letters)}\n"
        "    def _tokenize(self, text): return list(text)\n"
        "    def _convert_token_to_id(self, t): return self._letters.find(t)\n"
        "    def _convert_id_to_token(self, i): return self._letters[i]\n"
        "    def convert_tokens_to_string(self, tokens): return ''.join(tokens)\n"
        "    def save_vocabulary(self, *a, **k): return ()\n"
    )
    settings = {
        "tokenizer_class": "Letters",
        "eos_token": ".",
        "auto_map": {"AutoTokenizer": ["letters.Letters", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load_tokenizer(_config(tmp_path))
    tokenizer = load_tokenizer(_config(tmp_path, trust_remote_code=True))
    assert isinstance(tokenizer, PythonTokenizer)
    assert tokenizer.encode("cab", add_special_tokens=False) == [3, 1, 2]
    assert (tokenizer.decode([3, 1, 2, 0]), tokenizer.token_bytes(3), tokenizer.eos_ids) == ("cab", b"c", (0,))


@pytest.mark.parametrize("content", ["{", '{"model": 1}', ""])
def test_corrupt_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(_config(tmp_path))


def test_check_tokenizer(tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(_config(MAKERS["byte_level"](tmp_path)))
    size = tokenizer.vocab_size
    check_tokenizer(tokenizer, ModelFacts(vocab_size=size))
    check_tokenizer(tokenizer, ModelFacts(vocab_size=size + 100))
    with pytest.raises(ConfigError, match=rf"{size} tokens.* {size - 1} embeddings"):
        check_tokenizer(tokenizer, ModelFacts(vocab_size=size - 1))
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no eos"):
        check_tokenizer(load_tokenizer(_config(tmp_path)), ModelFacts(vocab_size=size))
    with pytest.raises(ConfigError, match=f"--eos-id: {size}"):
        check_tokenizer(load_tokenizer(_config(tmp_path, eos_id=(size,))), ModelFacts(vocab_size=size))
