"""`--load-format dummy`: a folder with nothing but a config.json resolves; the made tokenizer prints and takes ASCII."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.config import env, resolve
from inferserve.config.cli import parse
from inferserve.config.made_tokenizer import made_tokenizer
from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError
from inferserve.tokenize.load import check_tokenizer, load_tokenizer
from tests.fakes.model_folder import CONFIG, write_model

SIZES = (1, 64, 95, 300, 2000, 20_000, 128_256)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(env.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "no NVIDIA GPU found")
    return tmp_path / "cache"


@functools.cache
def tokenizer(size: int) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(made_tokenizer(size)))


def bare(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    body = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(body))
    return folder


def resolved(folder: Path, *flags: str) -> ServerConfig:
    return resolve.resolve(parse(["--model-dir", str(folder), "--load-format", "dummy", *flags]).settings, print)


# --------------------------------------------------------------------------------------------------- the tokenizer


@pytest.mark.parametrize("size", SIZES)
def test_every_id_is_printable_text_of_its_own(size: int) -> None:
    made = tokenizer(size)
    assert made.get_vocab_size() == size
    texts = [made.decode([i], skip_special_tokens=True) for i in range(size)]
    assert all(text and text.isascii() and text.isprintable() for text in texts)
    assert len(set(texts)) == size


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=0x7E, min_codepoint=0x20), max_size=200))
def test_printable_ascii_survives(text: str) -> None:
    made = tokenizer(20_000)
    assert made.decode(made.encode(text).ids) == text


@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None)
@given(text=st.text(max_size=50))
def test_any_text_can_be_encoded(size: int, text: str) -> None:
    made = tokenizer(size)
    assert all(0 <= i < size for i in made.encode(text).ids)
    assert bool(made.encode(text).ids) == bool(text)


def test_decoded_words_encode_to_as_many_ids() -> None:
    made = tokenizer(20_000)
    ids = list(range(12_000, 12_500))
    assert made.encode(made.decode(ids)).ids == ids


def test_a_vocabulary_beyond_all_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        made_tokenizer(2_000_000)


# ------------------------------------------------------------------------------------------------------ the folder


def test_a_config_is_enough(tmp_path: Path) -> None:
    folder = bare(tmp_path / "shape", vocab_size=1000)
    config = resolved(folder)
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    assert config.model_names == ("shape",)
    assert config.facts.weights == 2 * 1000 * 16 + 2 * (16 * 4 * 12 + 3 * 16 * 32 + 2 * 16) + 16
    made = load_tokenizer(config)
    check_tokenizer(made, config.facts)
    assert made.encode("hello")
    assert made.chat_template
    assert resolved(folder) == config


def test_an_end_token_is_made_where_the_config_has_none(tmp_path: Path) -> None:
    config = resolved(bare(tmp_path / "shape", eos_token_id=None))
    assert config.model.eos_id == (63,)
    check_tokenizer(load_tokenizer(config), config.facts)


def test_a_changed_config_is_another_model(tmp_path: Path) -> None:
    first = resolved(bare(tmp_path / "a"))
    second = resolved(bare(tmp_path / "b", vocab_size=65))
    assert first.facts.folder != second.facts.folder
    assert second.facts.vocab_size == 65


def test_a_tokenizer_that_is_there_is_used(tmp_path: Path, cache: Path) -> None:
    folder = write_model(tmp_path / "whole")
    (folder / "model.safetensors").write_bytes(b"not read")
    assert resolved(folder).facts.folder == str(folder)
    assert not cache.exists()


def test_the_fake_engine_has_no_weights(tmp_path: Path) -> None:
    assert resolved(bare(tmp_path / "shape"), "--engine", "fake").facts.weights == 0


@pytest.mark.parametrize(("content", "said"), [("{", "config.json"), ("{}", "model_type"), ("[]", "JSON")])
def test_what_is_no_model_is_named(tmp_path: Path, content: str, said: str) -> None:
    folder = bare(tmp_path / "shape")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        resolved(folder)


def test_without_it_weights_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors weights"):
        resolve.resolve(parse(["--model-dir", str(bare(tmp_path / "shape"))]).settings, print)


def test_shapes_that_come_with_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for folder in sorted((Path(__file__).parents[3] / "benchmarks/shapes").iterdir()):
        counts[folder.name] = resolved(folder).facts.weights / 1e9
    assert counts == {
        "llama-3.1-8b": pytest.approx(8.03, abs=0.01),
        "llama-70b-20-layers": pytest.approx(19.2, abs=0.1),
        "qwen3-0.6b": pytest.approx(0.596, abs=0.001),
    }
