"""Models whose linear layers other libraries have quantized."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [(name, module) for name, module in found if name != "lm_head"]


def hqq(model: nn.Module, bits: int) -> None:
    core = pytest.importorskip("hqq.core.quantize")
    for name, linear in linears(model):
        config = core.BaseQuantizeConfig(nbits=bits, group_size=32)
        with torch.no_grad():
            new = core.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def torchao(model: nn.Module, bits: int | str) -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    from torchao import quantization as q

    small = torch.int4, q.PerGroup(32)
    configs: dict[int | str, Callable[[], Any]] = {
        8: q.Int8WeightOnlyConfig,
        4: lambda: q.IntxWeightOnlyConfig(weight_dtype=small[0], granularity=small[1]),
        "float8": q.Float8WeightOnlyConfig,
        "int8, inputs too": q.Int8DynamicActivationInt8WeightConfig,
        "int4, inputs too": lambda: q.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=small[0], weight_granularity=small[1]
        ),
    }
    names = {name for name, _ in linears(model)}
    q.quantize_(model, configs[bits](), filter_fn=lambda module, name: name in names)
