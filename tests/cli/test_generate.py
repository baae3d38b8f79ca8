"""`xquant generate` in parts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.models import tiny
from support.word_tokenizer import model_folder
from xquant.cli.generate import _continue
from xquant.kernels.cpu import library as native


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


def test_a_machine_without_the_native_library_says_so_in_one_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path)
    tiny("llama", head_dim=32, hidden_size=128).save_pretrained(folder)
    monkeypatch.setattr(native, "loaded", lambda: (None, native.NOT_BUILT))
    monkeypatch.setattr(native, "isas", lambda: ())
    native.warn_of_absence.cache_clear()
    asked = ("generate", folder, "--method", "kivi-4bit:group=32", "--device", "cpu")
    said = [run(*asked, "--prompt", "w2 w3", "--max-new-tokens", 2) for _ in range(2)]
    assert [status for status, _, _ in said] == [0, 0]
    lines = [line for line in said[0][2].splitlines() if "runs in torch" in line]
    assert len(lines) == 1 and lines[0].startswith("xquant: attention runs in torch")
    assert said[1][2] == ""
