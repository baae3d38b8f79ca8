"""XQuant-CL against its definition, in plain steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.models import prompt, tiny
from xquant import KVCache
from xquant.quant.affine import dequantize, quantize

TOKENS, GROUP, FIRST_BITS, BITS = 32, 8, 4, 2


def through(x: Tensor, bits: int) -> Tensor:
    """``x`` as codes of so many bits per token give it back."""
    return dequantize(*quantize(x, bits, -1, GROUP), -1, GROUP, torch.empty_like(x))


@torch.inference_mode()
def read(model: Any, accumulator: int, stream: str, sink: int) -> tuple[list[Tensor], list[Tensor]]:
    """What each layer got of a text, ``[B, T, d]``, and the values that it then holds ``[B, T, G*D]``."""
    spec = f"xquant-cl-{BITS}bit:group={GROUP},form=mha,first_layers=1,first_bits={FIRST_BITS}"
    options = f"accumulator={accumulator},stream={stream},sink={sink}"
    cache, got = KVCache(model, f"{spec},{options}"), []

    def look(module: Any, args: tuple[Tensor]) -> None:
        got.append(args[0])

    layers = model.model.layers
    modules = layers if stream == "residual" else [layer.self_attn.v_proj for layer in layers]
    handles = [module.register_forward_pre_hook(look) for module in modules]
    model(prompt(2, TOKENS), past_key_values=cache)
    for handle in handles:
        handle.remove()
    return got, [layer.values.transpose(1, 2).flatten(2) for layer in cache.layers]


@pytest.mark.parametrize("stream", ["post", "residual"])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("accumulator", [3, 4, 16])
def test_a_layer_predicts_from_the_requantized_accumulator(accumulator: int, sink: int, stream: str) -> None:
    model = tiny("llama-mha")
    got, values = read(model, accumulator, stream, sink)
    carried: Tensor | None = None
    for layer, x, value in zip(model.model.layers, got, values, strict=True):
        if carried is None:
            recalled = through(x, FIRST_BITS)
        else:
            recalled = carried + through(x - carried, BITS)
        # K and V come from the accumulation itself; the layer above gets it requantized, but for sinks.
        exact = torch.cat([x[:, :sink], recalled[:, sink:]], 1)
        normal = layer.input_layernorm(exact) if stream == "residual" else exact
        torch.testing.assert_close(value, layer.self_attn.v_proj(normal), rtol=1e-4, atol=1e-4)
        above = recalled if accumulator == 16 else through(recalled, accumulator)
        carried = torch.cat([x[:, :sink], above[:, sink:]], 1)
