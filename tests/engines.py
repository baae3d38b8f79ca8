"""vLLM in this process, for tests that have it installed: on the CPU, eager, with little memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before anything imports vLLM.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def save_tiny(folder: Path, **other: Any) -> Path:
    """A random Llama, with heads that vLLM's own kernels take. ``other``: of its configuration."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **other})).save_pretrained(folder)
    return folder


@contextmanager
def engine(folder: Path, spec: str | None = None, **options: Any) -> Iterator[Any]:
    """An engine of vLLM; without a ``spec`` as it is without xquant. Options that begin with ``xquant_`` are
    xquant's."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
    }
    own = {name: options.pop(name) for name in list(options) if name.startswith("xquant_")}
    settings["additional_config"] = {} if spec is None else {"xquant": spec, **own}
    try:
        llm = LLM(str(folder), **{**settings, **options})
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def answers(llm: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The tokens that it goes on with, the likeliest ones."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    out = llm.generate(given, greedy, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in out]


def cache_config(llm: Any) -> Any:
    return llm.llm_engine.vllm_config.cache_config
