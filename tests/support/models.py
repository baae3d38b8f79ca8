"""Tiny models of every family, built in code: random weights, seeded, fp32, a few milliseconds each."""

import io
import pickle
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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

OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # channels turn with their neighbours, in some layers none; norm and attention side by side with the MLP
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"layer_types": MIXED, "sliding_window": 16}),
    # neighbours, in a half of a head
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 16}),
    # tables with every angle once, and a learned logit beside the scores
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"head_dim": 16, "layer_types": MIXED, "sliding_window": 16, "num_local_experts": 4},
    ),
    # learned positions, one projection of another kind
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    # a part of a head, projections fused by head
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    # attends by itself; one head of keys and values
    "falcon": (FalconForCausalLM, FalconConfig, {}),
    # a norm over all heads, none before attention
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {"layer_types": MIXED, "sliding_window": 16},
    ),
    # heads of two sizes, values that are normed keys, layers that attend to those below
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": MIXED,
            "sliding_window": 16,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    # latents instead of keys and values
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
    # attention and Mamba in the same layer
    "falcon_h1": (
        FalconH1ForCausalLM,
        FalconH1Config,
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    # linear attention between, an output gate
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    # the same, newer
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    # Mamba between
    "granitemoehybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            "layer_types": ["mamba", "attention"] * 2 + ["attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "num_local_experts": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
}
"""Families that differ in how keys are made and turned, or in what stands between attention layers."""


def tiny(family: str, **changes: Any) -> Any:
    """A model of ``family`` with the same random weights every time."""
    model_class, config_class, own = {**FAMILIES, **OTHERS}[family]
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


def pickled(model: Any) -> Any:
    """A copy by way of pickle."""
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    """A copy by way of `torch.save`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def what_is_set(model: Any) -> dict[str, Any]:
    """On a model and its modules: attributes, hooks and configurations."""
    found: dict[str, Any] = {"config": dict(vars(model.config))}
    for name, part in model.named_modules():
        kinds = part._forward_pre_hooks, part._forward_hooks, part._forward_hooks_always_called
        found[name] = (
            set(vars(part)),
            [len(hooks) for hooks in kinds],
            getattr(part, "config", None),
        )
    return found
