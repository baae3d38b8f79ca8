"""Tiny models of any class of transformers, from nothing but its default configuration.

Every field whose name says that it is a size is made small, in every part of the configuration. That
builds most models; what a few want besides is tried in turn.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

LAYERS = 6
VOCABULARY = 131
MOST_PARAMETERS = 200_000_000

_NAMES: dict[int, str] = {
    LAYERS: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth"
    " num_encoder_layers num_decoder_layers num_layers_per_stack",
    1: "n_group topk_group n_groups num_shared_experts n_shared_experts moe_num_shared_experts"
    " num_nextn_predict_layers first_k_dense_replace",
    2: "num_key_value_heads num_kv_heads n_kv_heads kv_n_heads num_experts_per_tok num_experts_per_token"
    " moe_topk moe_k moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
    " num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts"
    " n_routed_experts moe_num_experts index_n_heads linear_num_key_heads linear_num_value_heads",
    12: "v_head_dim",
    8: "rotary_dim",
    16: "head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim linear_key_head_dim"
    " linear_value_head_dim d_kv attention_head_dim kv_channels global_head_dim",
    32: "kv_lora_rank q_lora_rank o_lora_rank moe_intermediate_size expert_ffn_hidden_size sliding_window",
    64: "hidden_size d_model n_embd dim embed_dim intermediate_size ffn_dim encoder_ffn_dim"
    " decoder_ffn_dim d_ff n_inner ffn_hidden_size shared_expert_intermediate_size projection_dim"
    " out_hidden_size word_embed_proj_dim shared_intermediate_size dense_intermediate_size"
    " text_hidden_size vision_hidden_size audio_hidden_size hidden_size_per_layer_input",
    VOCABULARY: "vocab_size text_vocab_size decoder_vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
MULTI_HEAD = {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}
LARGE_HEADS = {**SIZES, "head_dim": 128, "hidden_size": 512}
"""For a multimodal RoPE whose sections are given in channels."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_FULL_AND_SLIDING = ["full_attention", "sliding_attention"] * (LAYERS // 2)
EXTRAS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "ministral": {"layer_types": _FULL_AND_SLIDING},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * LAYERS},
    "doge": {"keep_window_size": 8},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]}},
    "gemma3n_text": {"layer_types": _FULL_AND_SLIDING, "num_kv_shared_layers": 2},
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}},
    "glm_ocr_text": {"rope_parameters": _SECTIONS},
    "hunyuan_vl_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2, 2]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mistral": {"sliding_window": None},
    "qwen2_5_omni_text": {"rope_parameters": _SECTIONS},
}
"""By the type of a configuration: what it wants besides small sizes."""


def small(config: PreTrainedConfig, sizes: dict[str, int], fill: bool) -> dict[str, Any]:
    """The arguments that make a configuration like ``config`` with ``sizes`` at most; ``fill``: also those
    that are None."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found[name] = type(value)(**small(value, sizes, fill))
        elif name in TOKENS and value is not None:
            found[name] = TOKENS[name]
        elif name in sizes and value and isinstance(value, int):
            found[name] = min(value, sizes[name])
        elif name in sizes and value is None and fill:
            found[name] = sizes[name]
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        found["is_decoder"] = True
    return {**found, **EXTRAS.get(config.model_type, {})}


def configs(config_class: type[PreTrainedConfig]) -> Iterator[Callable[[], PreTrainedConfig]]:
    """Makers of tiny configurations to try in turn: each raises what its class says against such a one."""
    for sizes in (SIZES, MULTI_HEAD, LARGE_HEADS):
        for fill in (False, True):
            yield lambda sizes=sizes, fill=fill: config_class(**small(config_class(), sizes, fill))


def build(model_class: Any, config: PreTrainedConfig) -> Any:
    """A model with random weights, the same ones every time.

    Raises:
        ValueError: it has more than `MOST_PARAMETERS`.
    """
    count = sum(p.numel() for p in outline(model_class, config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.15)
    return model


def outline(model_class: Any, config: PreTrainedConfig) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return model_class(config)
