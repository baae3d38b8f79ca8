"""Tiny models that do with their cache, or with their positions, what most do not."""

from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
SWITCH = 32
"""Tokens from which on `long_rope` turns keys by other frequencies."""


def built(name: str, **changes: Any) -> Any:
    """The causal model ``<name>ForCausalLM`` with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def dynamic_rope() -> Any:
    """Other frequencies for every length past 32 tokens (dynamic NTK)."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return built("Llama", rope_parameters=rope, max_position_embeddings=SWITCH)


def long_rope(name: str = "Llama") -> Any:
    """One set of frequencies for passes of up to `SWITCH` tokens, another for longer ones (LongRoPE)."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": SWITCH,
    }
    more = {"original_max_position_embeddings": SWITCH} if name == "Phi3" else {}
    return built(name, rope_parameters=rope, max_position_embeddings=4 * SWITCH, **more)


IMAGE, START, END = 120, 122, 123
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 16, "hidden_size": 48, "mlp_ratio": 2},
    "Qwen2_5_VL": {
        "hidden_size": 16,
        "out_hidden_size": 48,
        "intermediate_size": 16,
        "fullatt_block_indexes": [0],
    },
    "Qwen3VL": {
        "hidden_size": 16,
        "out_hidden_size": 48,
        "intermediate_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
}


def with_images(name: str) -> Any:
    """A model with images, whose tokens have positions of several axes."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = getattr(transformers, f"{name}Config")(
        text_config={**SMALL, "rope_parameters": rope, "head_dim": 12},
        vision_config={"depth": 1, "num_heads": 2, "patch_size": 4, **VISION[name]},
        image_token_id=IMAGE,
        video_token_id=121,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
