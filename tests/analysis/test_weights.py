"""What quantizations make of a matrix, and which matrices they leave as they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from support.models import COMMON, tiny
from xquant.analysis.shapes import Skeleton
from xquant.analysis.weights import Quantization, quantization_of

ROWS, COLUMNS = 256, 512
GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}


def read(**given: Any) -> Quantization | None:
    return quantization_of(SimpleNamespace(quantization_config=given))


def groups(weights: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": weights}}, **given}


@pytest.mark.parametrize(
    ("given", "bits", "words"),
    [
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64, "AWQ 4 bits in groups of 64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8 + 24 / COLUMNS, "GPTQ 8 bits"),
        ({"load_in_8bit": True}, 8 + 32 / COLUMNS, "bitsandbytes 8 bits"),
        ({"load_in_4bit": True}, 4 + 32 / 64, "bitsandbytes 4 bits in groups of 64"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 32]},
            8 + 32 / 2048,
            "FP8 8 bits in blocks of 64 x 32",
        ),
        ({"quant_method": "fp8", "weight_block_size": None}, 8 + 32 / (ROWS * COLUMNS), "FP8 8 bits"),
        ({"quant_method": "fbgemm_fp8"}, 8 + 32 / COLUMNS, "FP8 8 bits"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, 8 + 32 / COLUMNS, "torchao 8 bits"),
        (
            {
                "quant_method": "torchao",
                "quant_type": "int4_weight_only",
                "quant_type_kwargs": {"group_size": 32},
            },
            5,
            "torchao 4 bits in groups of 32",
        ),
        (groups(GROUPED), 4 + 16 / 64, "compressed-tensors 4 bits in groups of 64"),
        (
            groups({**GROUPED, "symmetric": False}),
            4 + 20 / 64,
            "compressed-tensors 4 bits in groups of 64",
        ),
        (
            groups({"num_bits": 4, "type": "float", "group_size": 16}, quant_method="modelopt"),
            4 + 8 / 16,
            "ModelOpt 4 bits in groups of 16",
        ),
        (
            groups({"num_bits": 8, "strategy": "tensor"}),
            8 + 16 / (ROWS * COLUMNS),
            "compressed-tensors 8 bits",
        ),
    ],
)
def test_a_matrix_takes_its_codes_scales_and_zero_points(given, bits: float, words: str) -> None:
    quantization = read(**given)
    assert quantization is not None and str(quantization) == words
    packing = quantization.packing_of("model.layers.0.mlp.up_proj")
    assert packing is not None
    assert packing.nbytes((ROWS, COLUMNS)) == bits * ROWS * COLUMNS / 8
    assert packing.nbytes((8, ROWS, COLUMNS)) == bits * ROWS * COLUMNS


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"modules_to_not_convert": ["mlp.up_proj"]}, "model.layers.1.mlp.up_proj"),
        ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, "model.layers.1.self_attn.q_proj"),
        ({"modules_to_not_convert": ["visual"]}, "model.visual.blocks.0.attn.qkv"),
        ({"ignore": ["re:.*self_attn.*"]}, "model.layers.1.self_attn.q_proj"),
        ({"dynamic": {"-:.*gate_proj": {}}}, "model.layers.1.mlp.gate_proj"),
    ],
)
def test_layers_that_are_named_stay_as_they_are(given, left: str) -> None:
    quantization = read(quant_method="gptq", bits=4, **given)
    assert quantization is not None and quantization.packing_of(left) is None
    assert quantization.packing_of("model.layers.1.mlp.down_proj") is not None
    assert quantization.packing_of("model.layers.1.mlp.up_proj_too") is not None


def test_embeddings_norms_and_the_output_stay_as_they_are() -> None:
    model = tiny("llama")
    plain, packed = (Skeleton(model.config, torch.bfloat16, bits) for bits in (None, 4))
    linear = [m for m in plain.view.decoder.modules() if isinstance(m, torch.nn.Linear)]
    saved = sum(m.weight.nbytes - packed_nbytes(tuple(m.weight.shape)) for m in linear)
    assert plain.nbytes - packed.nbytes == saved > 0
    assert plain.nbytes_at(4) == packed.nbytes and plain.nbytes_at(16) == plain.nbytes
    layers = len(plain.view.layers)
    assert plain.layer_nbytes(0) - packed.layer_nbytes(0) == saved / layers
    assert (plain.weights, packed.weights) == ("bfloat16", "4 bits in groups of 128, the rest bfloat16")


def packed_nbytes(shape: tuple[int, int]) -> int:
    rows, columns = shape
    return rows * columns // 2 + rows * -(-columns // 128) * 2


def test_bits_that_are_asked_for_go_before_the_configuration() -> None:
    config = LlamaConfig(**COMMON, quantization_config={"quant_method": "aqlm"})
    skeleton = Skeleton(config, torch.bfloat16)
    with pytest.raises(ValueError, match=r"'aqlm' cannot be counted.*--weights-bits N"):
        _ = skeleton.nbytes
    assert Skeleton(config, torch.bfloat16, 4).nbytes < Skeleton(config, torch.bfloat16, 16).nbytes
    with pytest.raises(ValueError, match="torchao ModuleFqnToConfig"):
        read(quant_method="torchao", quant_type={"default": {"_type": "ModuleFqnToConfig"}})
