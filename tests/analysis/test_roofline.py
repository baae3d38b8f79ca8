"""Section 3.4 of arXiv 2508.10395: the printed figures, and the same on models and GPUs of today."""

import math
from dataclasses import replace

import pytest
import torch

from support.models import tiny
from xquant import parse_method
from xquant.analysis.gpus import GPUS, find_gpu
from xquant.analysis.memory import CacheLayout
from xquant.analysis.roofline import Load, layout_load
from xquant.analysis.shapes import Skeleton, shape_config

RIDGE = 378  # the paper's: 756 TFLOP/s over 2 TB/s


def mha_load(hidden: int, bits: float) -> Load:
    """One layer by equation 3: Llama-2's 12 d^2 weights in 16 bits, X in ``bits`` without ranges."""
    return Load(2 * 2 * hidden**2, bits / 8 * hidden, 2 * 12 * hidden**2)


def gqa_load(hidden: int, sharing: int, bits: float) -> Load:
    """One layer by equation 4: Llama-3.1's 13 d^2 weights and the fused ones, ``sharing`` query heads to a
    key/value head.

    As printed: it reads one latent of ``hidden / sharing`` channels, where the text above it has two.
    """
    width = hidden / sharing
    return Load(2 * 2 * width**2, bits / 8 * width, 2 * 13 * hidden**2 + 2 * 2 * width**2)


def load(shape: str, spec: str) -> Load | None:
    skeleton = Skeleton(shape_config(shape), torch.bfloat16)
    return layout_load(CacheLayout(skeleton, parse_method(spec)))


def test_equations_3_and_4_give_what_the_paper_prints() -> None:
    mha, gqa = mha_load(4096, 2), gqa_load(4096, 4, 2)
    assert round(mha.memory_bound_context(RIDGE), -2) == 2_300
    assert round(gqa.memory_bound_context(RIDGE), -2) == 40_600
    both = replace(gqa, nbytes=2 * gqa.nbytes)  # latents, as the text before the equation has it
    assert round(both.memory_bound_context(RIDGE), -2) == 41_600
    assert GPUS["h100-pcie"].ridge == RIDGE


@pytest.mark.parametrize(
    ("shape", "equation"),
    [("llama-2-7b", mha_load(4096, 2)), ("llama-3.1-8b", gqa_load(4096, 4, 2))],
)
def test_the_papers_models_come_out_near_its_equations(shape: str, equation: Load) -> None:
    found = load(shape, "xquant-2bit")
    assert found is not None
    # A layer of the equations for each of 32; real layers have a little more, and ranges are read too.
    assert found.flops == 32 * equation.flops
    assert found.weights == pytest.approx(32 * equation.weights, rel=0.01)
    expected = equation.memory_bound_context(RIDGE)
    assert found.memory_bound_context(RIDGE) == pytest.approx(expected, rel=0.05)


def test_deltas_cost_what_section_3_4_says() -> None:
    plain, mha = load("llama-2-7b", "xquant-2bit"), load("llama-2-7b", "xquant-cl-2bit")
    gqa = load("llama-3.1-8b", "xquant-cl-2bit:first_layers=1,accumulator=4")
    d, width, layers = 4096, 1024, 32
    assert plain is not None and mha is not None and gqa is not None
    assert mha.flops - plain.flops == 2 * d * 30  # layers from the base on
    # The base has no latents to bring back to d channels.
    assert gqa.flops == 2 * 4 * width * d * layers - 2 * 2 * width * d + 2 * d * layers
    codes = (31 * 2 * (2 * width) + 4 * d) / 8
    ranges = 4 * (31 * 16 + 32)  # per token, in groups of 128 channels
    assert gqa.nbytes == codes + ranges + layers * d * 4 / 8


def test_methods_that_keep_keys_and_values_rebuild_nothing() -> None:
    for spec in ("full", "kivi-2bit", "kvquant-3bit-1%", "crosslayer"):
        assert load("llama-3.1-8b", spec) is None


def test_a_load_that_reads_more_than_it_computes_is_memory_bound_anywhere() -> None:
    assert Load(flops=100, nbytes=1, weights=10).memory_bound_context(50) == 10
    assert math.isinf(Load(flops=100, nbytes=1, weights=10).memory_bound_context(100))


def test_layers_that_are_not_compressed_do_not_count() -> None:
    model = tiny("gemma2")
    skeleton = Skeleton(model.config, torch.float32)
    found = layout_load(CacheLayout(skeleton, parse_method("xquant-2bit:form=mha")))
    assert found is not None
    view = skeleton.view.compressed[0]
    assert found.flops == len(skeleton.view.compressed) * 2 * 2 * view.kv_width * view.hidden


def test_gpus_are_found_however_they_are_written() -> None:
    assert find_gpu("A100 80GB") == ("a100-80gb", GPUS["a100-80gb"])
    assert find_gpu("rtx4090")[0] == "rtx-4090"
    with pytest.raises(ValueError, match=r"no GPU 'tpu'.*a100-40gb.*rtx-3090"):
        find_gpu("tpu")
