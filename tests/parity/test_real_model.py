"""SmolLM2-135M-Instruct from its GGUF file: 20 prompts, 64 greedy tokens each, equal to transformers on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inferserve.config.demo import demo_model
from inferserve.config.model_source import locate
from inferserve.engine.torch_backend import TorchBackend
from inferserve.tokenize.load import load_tokenizer
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import Driver
from tests.parity.tiny import NEW_TOKENS, greedy, is_greedy

LONGEST = 512

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "To bake bread you need flour, water,",
    "SELECT name, COUNT(*) FROM",
    "In 1969, humans first",
    "The quick brown fox",
    "A list of colours:\n- red\n- green\n-",
    "Es war einmal ein König, der",
    "The Pythagorean theorem states that",
    "Machine learning is a field of",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\n# Compute the mean of",
    "She opened the letter, and",
    "The mitochondria is the powerhouse of the cell. It",
)


def their_model(folder: Path, gguf_file: Path) -> Any:
    """transformers' model, with the weights as its own GGUF code reads them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_of_smollm2() -> None:
    gguf_file = demo_model()
    source = locate("", print)
    config = server_config(
        source.folder,
        gguf_file=gguf_file,
        max_req_total_len=LONGEST,
        kv_tokens=8192,
        cpu_threads=torch.get_num_threads(),
    )
    tokenizer = load_tokenizer(config)
    prompts = [tuple(tokenizer.encode(text)) for text in PROMPTS]
    theirs = their_model(source.folder, gguf_file)
    engine = TorchBackend(config, ROWS)
    facts = engine.start()
    assert facts.about["runs_on"] == "Decoder"
    driver = Driver(engine, kv_tokens=facts.kv_tokens, max_rows=ROWS, max_len=LONGEST, prefix_cache=True, chunk=64)
    answers = driver.generate(prompts, NEW_TOKENS, batch=8)
    wrong = [
        text
        for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True)
        if not is_greedy(theirs, prompt, answer)
    ]
    assert not wrong
    assert answers[0] == greedy(theirs, prompts[0])


@pytest.mark.real_model
@pytest.mark.slow
def test_the_generic_backend_reads_the_file_too() -> None:
    gguf_file = demo_model()
    folder = locate("", print).folder
    config = server_config(folder, gguf_file=gguf_file, model_backend="transformers", kv_tokens=1024)
    engine = TorchBackend(config, ROWS)
    facts = engine.start()
    assert facts.about["runs_on"] == "GenericModel"
    prompt = tuple(load_tokenizer(config).encode(PROMPTS[0]))
    driver = Driver(engine, kv_tokens=facts.kv_tokens, max_rows=ROWS, max_len=192, prefix_cache=True, chunk=64)
    (answer,) = driver.generate([prompt], 16, batch=1)
    assert is_greedy(their_model(folder, gguf_file), prompt, answer)
