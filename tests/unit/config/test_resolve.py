"""`resolve()`: defaults that follow from the model, and everything that can be wrong with a model's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from inferserve.config import machine, model_source, resolve
from inferserve.config.checks import check_resolved
from inferserve.config.cli import parse
from inferserve.config.schema import ParallelPart, ServerConfig, decode, encode
from inferserve.errors import ConfigError
from tests.fakes.model_folder import EOS, embedding, safetensors, tokenizer, write_model


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same defaults on every machine."""
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "no NVIDIA GPU found")


def _resolve(model: Path, *flags: str) -> ServerConfig:
    return resolve.resolve(parse(["--model-dir", str(model), *flags]).settings)


def _problems(model: Path, *flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        _resolve(model, *flags)
    return caught.value.problems


# -------------------------------------------------------------------------------------------------------- defaults


def test_defaults_follow_from_the_model(tmp_path: Path) -> None:
    config = _resolve(write_model(tmp_path / "my-model"))
    assert config.model_names == ("my-model",)
    assert config.model.max_req_total_len == 512
    assert config.model.eos_id == (EOS,)
    assert config.model.data_type == "float32" and config.engine.device == "cpu"
    assert config.engine.attention_backend == "reference" and config.engine.pipeline_depth == 0
    assert config.engine.cpu_threads >= 1
    assert config.schedule.chunked_prefill_size == 128 and config.schedule.batch_max_tokens == 256
    facts = config.facts
    assert (facts.model_type, facts.architecture, facts.vocab_size) == ("llama", "LlamaForCausalLM", 64)
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.weights) == (2, 2, 4, 64 * 16)
    assert decode(encode(config)) == config


def test_a_long_context_is_served_up_to_16384(tmp_path: Path) -> None:
    config = _resolve(write_model(tmp_path / "m", max_position_embeddings=131072))
    assert config.model.max_req_total_len == 16384
    assert (config.schedule.chunked_prefill_size, config.schedule.batch_max_tokens) == (128, 256)
    assert _resolve(tmp_path / "m", "--max-req-total-len", "100000").model.max_req_total_len == 100000


def test_a_gpu_changes_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "")
    config = _resolve(write_model(tmp_path / "m", max_position_embeddings=131072))
    assert (config.engine.device, config.engine.attention_backend, config.engine.pipeline_depth) == (
        "cuda",
        "triton",
        1,
    )
    assert config.model.data_type == "bfloat16"
    assert (config.schedule.chunked_prefill_size, config.schedule.batch_max_tokens) == (4096, 8448)
    assert _resolve(tmp_path / "m", "--device", "cpu").engine.device == "cpu"
    assert _resolve(tmp_path / "m", "--engine", "fake").engine.device == "cpu"


def test_steps_have_a_target_where_they_can_be_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m")
    assert _resolve(model).schedule.target_step_ratio == 0
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "")
    schedule = _resolve(model).schedule
    assert (schedule.target_step_ratio, schedule.target_step_ms) == (1.35, 0)
    schedule = _resolve(model, "--target-step-ms", "12").schedule
    assert (schedule.target_step_ratio, schedule.target_step_ms) == (0, 12)
    assert _resolve(model, "--target-step-ratio", "0").schedule.target_step_ratio == 0


def test_guesses_are_of_four_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    assert _resolve(model).engine.spec_tokens == 0
    assert _resolve(model, "--spec-mode", "ngram").engine.spec_tokens == 4
    assert _resolve(model, "--spec-mode", "ngram", "--spec-tokens", "7").engine.spec_tokens == 7


def test_deterministic_needs_parts_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m")
    (problem,) = _problems(model, "--deterministic")
    assert "--device cpu" in problem
    assert _resolve(model, "--deterministic", "--engine", "fake", "--spec-mode", "ngram").engine.deterministic
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "")
    config = _resolve(model, "--deterministic")
    assert config.engine.deterministic and config.schedule.router_token_ratio == 0, "nothing is paused"
    for flags in (
        ("--spec-mode", "ngram"),
        ("--model-backend", "transformers"),
        ("--attention-backend", "reference"),
        ("--quant-type", "fp8w8a8"),
    ):
        (problem,) = _problems(model, "--deterministic", *flags)
        assert problem.startswith(f"--deterministic contradicts {' '.join(flags)}")
    two = replace(_resolve(model, "--deterministic"), parallel=ParallelPart(tp=2))
    assert any(p.startswith("--deterministic contradicts --tp 2") for p in check_resolved(two, 512))


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        ("--tp 3", {}, ["--tp 3: does not divide num_attention_heads 4", "--tp 3: does not divide", "--tp 3: neither"]),
        (
            "--tp 2",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            ["--tp 2: neither divides num_key_value_heads 3"],
        ),
        ("--tp 2", {"intermediate_size": 33}, ["--tp 2: does not divide intermediate_size 33"]),
        ("--tp 2 --model-backend transformers", {}, ["--tp 2 contradicts --model-backend transformers"]),
        ("--tp 2 --all-reduce symmetric", {}, ["--all-reduce symmetric contradicts --device cpu"]),
    ],
)
def test_ranks_must_divide_the_model(tmp_path: Path, flags: str, config: dict[str, int], said: list[str]) -> None:
    problems = _problems(write_model(tmp_path / "m", **config), "--device", "cpu", *flags.split())
    assert len(problems) >= len(said) and all(any(problem.startswith(text) for problem in problems) for text in said)


@pytest.mark.parametrize("flags", ["--tp 2", "--quant-type fp8w8a8", "--model-backend native"])
def test_what_needs_our_own_layers_is_refused_before_anything_starts(tmp_path: Path, flags: str) -> None:
    (problem,) = _problems(write_model(tmp_path / "m", model_type="otter"), "--device", "cpu", *flags.split())
    assert problem.startswith(flags) and "model type 'otter' is not one of llama" in problem
    assert _resolve(write_model(tmp_path / "n", model_type="otter"), "--engine", "fake", *flags.split())


def test_ranks_share_the_cores_and_may_repeat_kv_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "cpu_count", lambda: 6)
    model = write_model(tmp_path / "m")
    assert _resolve(model, "--device", "cpu", "--tp", "4").engine.cpu_threads == 1
    assert _resolve(model, "--device", "cpu", "--tp", "2").engine.cpu_threads == 3
    assert _resolve(model, "--engine", "fake", "--tp", "3").parallel.tp == 3


def test_each_rank_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "cuda_problem", lambda: "")
    monkeypatch.setattr(resolve, "gpu_count", lambda: 1)
    assert _problems(write_model(tmp_path / "m"), "--tp", "2") == ("--tp 2: GPUs visible here: 1",)
    assert _resolve(write_model(tmp_path / "n"), "--tp", "2", "--device", "cpu").parallel.tp == 2


def test_the_kv_pool_limits_the_default_length(tmp_path: Path) -> None:
    config = _resolve(write_model(tmp_path / "m"), "--max-total-token-num", "100")
    assert config.model.max_req_total_len == 100 and config.schedule.batch_max_tokens == 100


def test_without_chunking_a_step_takes_the_longest_prompt(tmp_path: Path) -> None:
    config = _resolve(write_model(tmp_path / "m"), "--disable-chunked-prefill")
    assert config.schedule.chunked_prefill_size == config.schedule.batch_max_tokens == 512


def test_a_batch_limit_alone_limits_the_chunk(tmp_path: Path) -> None:
    config = _resolve(write_model(tmp_path / "m"), "--batch-max-tokens", "64")
    assert (config.schedule.chunked_prefill_size, config.schedule.batch_max_tokens) == (64, 64)


def test_short_dtype_names_are_spelled_out(tmp_path: Path) -> None:
    assert _resolve(write_model(tmp_path / "m"), "--data-type", "bf16").model.data_type == "bfloat16"


def test_eos_is_the_union_of_both_files(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", eos_token_id=[2, 5])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert _resolve(model).model.eos_id == (2, 5, 7)
    assert _resolve(model, "--eos-id", "9").model.eos_id == (9,)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"top_k": 0, "temperature": 0.6, "top_p": "high"}, {"temperature": 0.6, "top_k": -1.0}),
        ({"do_sample": True, "top_k": 20}, {"do_sample": 1.0, "top_k": 20.0}),
        ({"do_sample": False}, {"do_sample": 0.0}),
        ({"do_sample": 1, "temperature": True}, {}),
    ],
)
def test_generation_config_gives_sampling_defaults(
    tmp_path: Path, generation: dict[str, object], defaults: dict[str, float]
) -> None:
    model = write_model(tmp_path / "m")
    (model / "generation_config.json").write_text(json.dumps(generation))
    assert _resolve(model).facts.generation_defaults == defaults


@pytest.mark.parametrize("flag", ["--fake-kv-tokens", "--max-total-token-num"])
def test_the_longest_request_fits_a_small_pool(tmp_path: Path, flag: str) -> None:
    config = _resolve(write_model(tmp_path / "m"), "--engine", "fake", flag, "100")
    assert config.engine.fake_kv_tokens == config.model.max_req_total_len == 100


def test_eos_falls_back_to_the_tokenizer_s(tmp_path: Path) -> None:
    assert _resolve(write_model(tmp_path / "m", eos_token_id=None)).model.eos_id == (EOS,)


def test_the_fake_engine_needs_no_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    config = _resolve(model, "--engine", "fake")
    assert config.engine.fake_kv_tokens == 1048576 and config.facts.weights == 0


# ------------------------------------------------------------------------------------------------- what is wrong


def _shards(model: Path, **files: bytes) -> None:
    (model / "model.safetensors").unlink()
    names = {"a.safetensors": "model.embed_tokens.weight", "b.safetensors": "lm_head.weight"}
    index = {"weight_map": {tensor: file for file, tensor in names.items()}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in files.items():
        (model / f"{name}.safetensors").write_bytes(content)


_GOOD = safetensors(embedding())


def _missing_shard(model: Path) -> None:
    _shards(model, a=_GOOD)


def _tensor_not_in_shard(model: Path) -> None:
    _shards(model, a=_GOOD, b=_GOOD)


def _truncated(model: Path) -> None:
    (model / "model.safetensors").write_bytes(_GOOD[:-5])


def _too_long(model: Path) -> None:
    (model / "model.safetensors").write_bytes(_GOOD + b"x")


def _not_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x80" * 100)


def _header_not_json(model: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope")


def _wrong_shape(model: Path) -> None:
    (model / "model.safetensors").write_bytes(safetensors({"model.embed_tokens.weight": ("BF16", [64, 17], 2048)}))


def _overlap(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(safetensors({"x": ("U8", [4], 4), "y": ("U8", [4], 4)}).replace(b"[4, 8]", b"[2, 6]"))


def _pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _evil_index(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))


def _large_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text(json.dumps(tokenizer(70)))


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}}')


def _no_eos(model: Path) -> None:
    write_model(model, eos_token_id=None)
    (model / "tokenizer_config.json").unlink()


def _broken_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def _config_without_layers(model: Path) -> None:
    write_model(model, num_hidden_layers=None)


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _fewer_embeddings(model: Path) -> None:
    write_model(model, rows=60, tokens=60)


def _eos_outside(model: Path) -> None:
    write_model(model, eos_token_id=64)


@pytest.mark.parametrize(
    ("damage", "file", "says"),
    [
        (_missing_shard, "b.safetensors", "missing shard"),
        (_tensor_not_in_shard, "b.safetensors", "tensor 'lm_head.weight' is missing"),
        (_truncated, "model.safetensors", "truncated: the header describes 2048 bytes of data, the file has 2043"),
        (_too_long, "model.safetensors", "too long"),
        (_not_safetensors, "model.safetensors", "not safetensors"),
        (_header_not_json, "model.safetensors", "corrupt safetensors header"),
        (_wrong_shape, "model.safetensors", "tensor 'model.embed_tokens.weight' BF16 [64, 17] takes 2048 bytes"),
        (_overlap, "model.safetensors", "tensor 'y' has wrong offsets"),
        (_pickled, "m", "only pickled ones, which are never loaded"),
        (_evil_index, "index.json", "shard '../../etc/passwd' is not a file name"),
        (_large_tokenizer, "tokenizer.json", "70 token ids, the model's embeddings only 64"),
        (_no_tokenizer, "m", "no tokenizer"),
        (_broken_tokenizer, "tokenizer.json", "Expected"),
        (_no_eos, "m", "give --eos-id"),
        (_broken_config, "config.json", "JSON"),
        (_config_without_layers, "m", "num_hidden_layers is missing"),
        (_no_config, "--model-dir", "no config.json in the folder"),
        (_fewer_embeddings, "m", "config.json says vocab_size 64, the embeddings have 60 rows"),
        (_eos_outside, "m", "eos id 64 is outside the vocabulary of 64"),
    ],
)
def test_one_line_names_the_file(tmp_path: Path, damage: Callable[[Path], None], file: str, says: str) -> None:
    model = write_model(tmp_path / "m")
    damage(model)
    (problem,) = _problems(model)
    assert says in problem and file in problem.split(": ")[0], problem
    assert "\n" not in problem


def test_all_that_is_wrong_with_a_model_is_told_at_once(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    _missing_shard(model)
    _large_tokenizer(model)
    assert len(_problems(model)) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-req-total-len", "600"], "--max-req-total-len 600 exceeds the model's context of 512"),
        (["--eos-id", "64"], "--eos-id 64: outside the vocabulary of 64"),
        (["--device", "cuda"], "--device cuda: no NVIDIA GPU found"),
        (["--attention-backend", "triton"], "--attention-backend triton needs a GPU"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja: No such file"),
        (["--disable-chunked-prefill", "--batch-max-tokens", "100"], "--batch-max-tokens 100 is less than"),
        (["--chunked-prefill-size", "600", "--batch-max-tokens", "500"], "--batch-max-tokens 500 is less than"),
    ],
)
def test_flags_are_checked_against_model_and_machine(tmp_path: Path, flags: list[str], says: str) -> None:
    (problem,) = _problems(write_model(tmp_path / "m"), *flags)
    assert says in problem


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "~/nothing-here", "nothing.gguf", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    (problem,) = _problems(Path(name)) if name != "./nothing" else _dotted()
    assert "no such file or folder" in problem and "--model-dir" in problem


def _dotted() -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(parse(["--model-dir", "./nothing"]).settings)
    return caught.value.problems


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(parse(["--model-dir", "no-such-owner/no-such-model"]).settings, report=lambda _: None)
    (problem,) = caught.value.problems
    assert problem.startswith("--model-dir no-such-owner/no-such-model: ") and "\n" not in problem


def test_a_folder_of_ggufs_says_which_file_to_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert f"name the file in it: {tmp_path}/x.gguf" in model_source.check_path(str(tmp_path))[0]


# ----------------------------------------------------------------------------------------------------------- machine


def test_control_groups_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/a/b\n")
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    1000000 kB\n")
    for folder, limit in ((group, "max"), (group / "a", "9000000"), (group / "a/b", "max")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("5000000")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    monkeypatch.setattr(machine, "_PROC", proc)
    monkeypatch.setattr(machine, "_CGROUP", group)
    assert machine.available_memory() == 9000000 - 5000000 + 700
    (group / "a/memory.max").write_text("max")
    assert machine.available_memory() == 1000000 * 1024


def test_hidden_gpus_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in machine.cuda_problem()


def test_dynamic_rope_beyond_its_original_context_needs_a_plain_prefill(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    folder = write_model(tmp_path / "m", max_position_embeddings=64, rope_theta=10000.0, rope_scaling=scaling)
    assert _resolve(folder).model.max_req_total_len == 64
    longer = ("--max-req-total-len", "128")
    (problem,) = _problems(folder, *longer)
    assert "--disable-dynamic-prompt-cache and --disable-chunked-prefill" in problem
    plain = _resolve(folder, *longer, "--disable-dynamic-prompt-cache", "--disable-chunked-prefill")
    assert plain.model.max_req_total_len == 128
