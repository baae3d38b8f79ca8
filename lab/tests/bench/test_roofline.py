"""The least that the attention of a step takes, against counts by hand."""

import torch

from xquant import parse_method
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton, shape_config
from xquant_lab.bench.roofline import Attention, attention_step

D, G, H, SIZE, LAYERS = 4096, 8, 32, 128, 32
"""Of Llama-3.1-8B: hidden size, key/value heads, query heads, size of a head, layers."""


def step(shape: str, spec: str, context: int, batch: int) -> Attention:
    skeleton = Skeleton(shape_config(shape), torch.bfloat16)
    found = attention_step(CacheLayout(skeleton, parse_method(spec)), context, batch)
    assert found is not None
    return found


def test_a_cache_of_keys_and_values_is_read_once_and_multiplied_twice() -> None:
    full = step("llama-3.1-8b", "full", 8192, 3)
    assert full.nbytes == LAYERS * 3 * 8192 * 2 * G * SIZE * 2
    assert full.flops == LAYERS * 3 * 8192 * 2 * 2 * H * SIZE
    kivi = step("llama-3.1-8b", "kivi-4bit", 8192 + 5, 1)
    block = 128 * 2 * G * SIZE // 2 + 4 * (G * SIZE + 128 * G)  # codes, then ranges of 128
    assert kivi.nbytes == LAYERS * (64 * block + 5 * 2 * G * SIZE * 2)
    assert kivi.flops == LAYERS * (8192 + 5) * 2 * 2 * H * SIZE


def test_keys_are_rebuilt_once_a_key_value_head_and_values_after_their_sum() -> None:
    width, context, batch = G * SIZE, 8192, 2
    found = step("llama-3.1-8b", "xquant-4bit", context, batch)
    keys, scores, sums = 2 * width * width, 2 * H * SIZE, 2 * H * width
    last = 2 * H * SIZE * width
    assert found.flops == LAYERS * batch * (context * (keys + scores + sums) + last)
    held = step("llama-3.1-8b", "kivi-4bit", context, batch).nbytes  # latents take as much
    assert found.nbytes == held + LAYERS * 2 * 2 * width * width
    mha = step("llama-2-7b", "xquant-4bit", context, 1)
    assert mha.flops == 32 * (context * (2 * D * D + 2 * D + 2 * 32 * D) + 2 * D * D)


def test_deltas_are_brought_back_added_up_and_carried_from_layer_to_layer() -> None:
    context, width = 8192, G * SIZE
    found = step("llama-3.1-8b", "xquant-cl-2bit:first_layers=1", context, 1)
    over = 2 * H * SIZE
    keys, sums = 2 * D * width, 2 * H * D
    deltas = 2 * 2 * width * D * (LAYERS - 1) + 2 * D * LAYERS
    assert found.flops == LAYERS * (context * (keys + over + sums) + over * D) + context * deltas
    carried = 2 * (LAYERS - 1) * context * D * 2  # written by all but the last, read by all but the first
    layout = CacheLayout(
        Skeleton(shape_config("llama-3.1-8b"), torch.bfloat16),
        parse_method("xquant-cl-2bit:first_layers=1"),
    )
    held = layout.count(context, 1)
    matrices = LAYERS * 2 * 2 * D * width + (LAYERS - 1) * 2 * 2 * width * D
    assert found.nbytes == held.total - held.index + carried + matrices


def test_the_least_time_is_that_of_the_slower_of_moving_and_multiplying() -> None:
    assert Attention(nbytes=100, flops=6).seconds(bandwidth=50, rate=2) == 3
    assert Attention(nbytes=100, flops=2).seconds(bandwidth=50, rate=2) == 2


def test_predictions_from_keys_and_values_are_not_counted() -> None:
    skeleton = Skeleton(shape_config("smollm2"), torch.bfloat16)
    assert attention_step(CacheLayout(skeleton, parse_method("tc-cl-2bit")), 512, 1) is None
    assert attention_step(CacheLayout(skeleton, parse_method("tc-2bit")), 512, 1) is not None
