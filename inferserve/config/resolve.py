"""`resolve()`: from what the user set to the one frozen `ServerConfig` in which every value is concrete.

Order: contradictions between flags, then the model's files, then defaults that follow from model and machine, then
what those make wrong. Each step reports everything it finds; nothing is loaded that takes long. Whether memory suffices
is the launcher's question, since it knows the shared segments.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from inferserve.config.checks import check_resolved, check_settings, check_tp
from inferserve.config.dummy_model import completed, weight_count
from inferserve.config.machine import cpu_count, cuda_problem, gpu_count
from inferserve.config.model_files import ModelFiles, read_model
from inferserve.config.model_source import ModelSource, Report, check_path, locate
from inferserve.config.native import check_native
from inferserve.config.quantization import ALIASES
from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.errors import ConfigError

LONGEST_DEFAULT = 16384
# Prompt tokens of one sequence in a step, how many such chunks a step holds, and what it holds beside them. On a CPU a
# step is small (256 tokens of a 135M model take 0.4 s on two cores): everybody's next token, and an abort, wait for its end.
_CHUNK = {"cuda": 4096, "cpu": 128}
_CHUNKS = {"cuda": 2, "cpu": 1}
_DECODE_ROOM = {"cuda": 256, "cpu": 128}
_STEP_RATIO = {"cuda": 1.35, "cpu": 0.0}
_SPEC_TOKENS = {"none": 0, "ngram": 4}
_FAKE_KV_TOKENS = 1048576
_COMPILE_WORKERS = 8
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve(asked: ServerConfig, report: Report = _report) -> ServerConfig:
    """Check `asked` and fill in every default.

    Args:
        asked: as `cli.parse` made it, with auto values (0, '', 'auto').
        report: called with a line before something that takes seconds (a download, a conversion).

    Raises ConfigError with one line for each problem, naming the flag or the file.
    """
    problems = [*check_settings(asked), *_check_files(asked), *_check_device(asked)]
    if problems:
        raise ConfigError(*problems)
    source = locate(asked.model.model_dir, report)
    fake, dummy = asked.engine.engine == "fake", asked.model.load_format == "dummy"
    if dummy:
        source = completed(source, report)
    files = read_model(source, with_weights=not (fake or dummy), eos_given=bool(asked.model.eos_id))
    config = _fill(asked, source, files)
    problems = [*check_resolved(config, files.config.context_length), *_check_rope(config, files)]
    problems += _check_quantization(asked, files)
    problems += [] if fake else [*check_native(config, files.config), *check_tp(config, files.config)]
    if problems:
        raise ConfigError(*problems)
    return config


def _check_files(asked: ServerConfig) -> list[str]:
    problems = check_path(asked.model.model_dir)
    template = asked.model.chat_template
    if template:
        try:
            if not Path(template).expanduser().read_text(encoding="utf-8").strip():
                problems.append(f"--chat-template {template}: the file is empty")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"--chat-template {template}: {getattr(error, 'strerror', None) or error}")
    return problems


def _check_rope(config: ServerConfig, files: ModelFiles) -> list[str]:
    """Dynamic NTK rope turns every earlier key anew as a text outgrows the original context: no cached KV is right then."""
    original = files.config.max_position
    if files.config.rope.kind != "dynamic" or config.model.max_req_total_len <= original:
        return []
    if config.engine.disable_dynamic_prompt_cache and config.schedule.disable_chunked_prefill:
        return []
    return [
        f"--max-req-total-len {config.model.max_req_total_len}: dynamic rope scaling beyond {original} tokens needs"
        " --disable-dynamic-prompt-cache and --disable-chunked-prefill"
    ]


def _check_quantization(asked: ServerConfig, files: ModelFiles) -> list[str]:
    stored, wanted = files.config.quantization, asked.model.quant_type
    if wanted == "none" or stored is None or stored.quant_type == ALIASES.get(wanted, wanted):
        return []
    return [f"--quant-type {wanted}: the checkpoint is quantised already ({stored.quant_type or stored.method})"]


def _check_device(asked: ServerConfig) -> list[str]:
    if asked.engine.engine == "fake":
        return []
    problem = cuda_problem() if asked.engine.device == "cuda" else ""
    if problem:
        return [f"--device cuda: {problem}"]
    tp = asked.parallel.tp
    if tp > 1 and asked.engine.device != "cpu" and not cuda_problem() and tp > gpu_count():
        return [f"--tp {tp}: GPUs visible here: {gpu_count()}"]
    if asked.engine.attention_backend == "triton" and asked.engine.device == "auto" and cuda_problem():
        return [f"--attention-backend triton needs a GPU: {cuda_problem()}"]
    return []


# -------------------------------------------------------------------------------------------------------- defaults


def _fill(asked: ServerConfig, source: ModelSource, files: ModelFiles) -> ServerConfig:
    engine = _engine(asked.engine, asked.parallel.tp)
    model = _model(asked, source, files, engine.device)
    return replace(
        asked,
        engine=engine,
        model=model,
        schedule=_schedule(asked.schedule, model.max_req_total_len, engine.device, engine.deterministic),
        facts=_facts(asked, source, files),
    )


def _engine(asked: EnginePart, tp: int) -> EnginePart:
    fake = asked.engine == "fake"
    device = asked.device
    if device == "auto":
        device = "cpu" if fake or cuda_problem() else "cuda"
    attention = asked.attention_backend
    if attention == "auto":
        attention = "triton" if device == "cuda" else "reference"
    return replace(
        asked,
        device=device,
        attention_backend=attention,
        cpu_threads=asked.cpu_threads or max(1, cpu_count() // tp),
        compile_workers=asked.compile_workers or max(1, min(_COMPILE_WORKERS, cpu_count() // (2 * tp))),
        spec_tokens=asked.spec_tokens or _SPEC_TOKENS[asked.spec_mode],
        pipeline_depth=asked.pipeline_depth if asked.pipeline_depth >= 0 else int(device == "cuda"),
        fake_kv_tokens=(asked.fake_kv_tokens or asked.max_total_token_num or _FAKE_KV_TOKENS) if fake else 0,
    )


def _model(asked: ServerConfig, source: ModelSource, files: ModelFiles, device: str) -> ModelPart:
    model = asked.model
    dtype = _DTYPES.get(model.data_type, model.data_type)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else files.config.dtype or "bfloat16"
    pool = asked.engine.fake_kv_tokens or asked.engine.max_total_token_num
    context = files.config.max_position if files.config.rope.kind == "dynamic" else files.config.context_length
    longest = min(context, LONGEST_DEFAULT, pool or LONGEST_DEFAULT)
    return replace(
        model,
        data_type=dtype,
        quant_type=_quant_type(asked, files),
        served_model_name=model.served_model_name or source.name,
        eos_id=model.eos_id or files.eos_ids,
        max_req_total_len=model.max_req_total_len or longest,
        chat_template=str(Path(model.chat_template).expanduser().resolve()) if model.chat_template else "",
    )


def _quant_type(asked: ServerConfig, files: ModelFiles) -> str:
    """The checkpoint's own where it has one."""
    stored, wanted = files.config.quantization, asked.model.quant_type
    return (stored and stored.quant_type) or ALIASES.get(wanted, wanted)


def _schedule(asked: SchedulePart, longest: int, device: str, deterministic: bool) -> SchedulePart:
    ratio = asked.target_step_ratio
    if ratio < 0:
        ratio = 0.0 if asked.target_step_ms else _STEP_RATIO[device]
    asked = replace(
        asked,
        target_step_ratio=ratio,
        # A paused sequence would be computed again as a prompt, which may give other last bits.
        router_token_ratio=0.0 if deterministic else asked.router_token_ratio,
    )
    if asked.disable_chunked_prefill:
        return replace(asked, chunked_prefill_size=longest, batch_max_tokens=asked.batch_max_tokens or longest)
    limit = min(longest, asked.batch_max_tokens or longest)
    chunk = asked.chunked_prefill_size or min(_CHUNK[device], limit)
    wanted = max(_CHUNKS[device] * chunk + _DECODE_ROOM[device], asked.running_max_req_size)
    return replace(
        asked, chunked_prefill_size=chunk, batch_max_tokens=asked.batch_max_tokens or max(chunk, min(wanted, longest))
    )


def _facts(asked: ServerConfig, source: ModelSource, files: ModelFiles) -> ModelFacts:
    drawn = asked.model.load_format == "dummy" and asked.engine.engine == "torch"
    in_files = files.weights.elements if files.weights else 0
    return ModelFacts(
        folder=str(source.folder),
        gguf_file=str(source.gguf or ""),
        model_type=files.config.model_type,
        architecture=files.config.architecture,
        vocab_size=files.config.vocab_size,
        max_position=files.config.max_position,
        num_layers=files.config.num_layers,
        num_kv_heads=files.config.num_kv_heads,
        head_dim=files.config.head_dim,
        weights=weight_count(files.config) if drawn else in_files,
        generation_defaults=files.generation_defaults,
    )
