"""`xquant generate` in parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xquant.cli.generate import _continue


@pytest.mark.parametrize(("pad", "end", "given"), [(0, 7, 0), (3, 7, 3), (None, 7, 7)])
def test_the_padding_token_is_the_tokenizers_own_also_where_it_is_0(
    pad: int | None, end: int, given: int
) -> None:
    asked: dict[str, Any] = {}

    def generate(**options: Any) -> torch.Tensor:
        asked.update(options)
        return torch.zeros(1, 5, dtype=torch.long)

    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=end)
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.long)}
    network = SimpleNamespace(generate=generate)
    new = _continue(network, tokenizer, inputs, None, 2, 0.0, 0, lambda *steps: None)
    assert asked["pad_token_id"] == given and len(new) == 2
