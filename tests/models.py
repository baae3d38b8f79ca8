"""Tiny models of every family, built in code: random weights, seeded, fp32, a few milliseconds each."""

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 131
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
MIXED = [
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
    "full_attention",
]

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "head_dim": 16,
            "layer_types": MIXED,
            "sliding_window": 16,
            "attn_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "layer_types": MIXED, "sliding_window": 16},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": None, "num_key_value_heads": 4}),
}


def tiny(family: str, **changes: Any) -> Any:
    """A model of ``family`` with the same random weights every time."""
    model_class, config_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**COMMON, **own, **changes})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = VOCABULARY  # never generated
    return model


def prompt(batch: int = 1, length: int = 40, seed: int = 1) -> torch.Tensor:
    """Token ids ``[batch, length]`` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of unequal length as ``generate`` takes them."""
    width = max(lengths)
    ids = prompt(len(lengths), width, seed)
    mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}
