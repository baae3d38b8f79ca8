"""What an engine is told when it starts."""

import pytest
import torch

from support.models import tiny
from xquant.analysis.shapes import shape_config
from xquant.kernels import cpu
from xquant.models import view_model
from xquant.serve import fit
from xquant.serve.build import Model
from xquant.serve.capacity import room_of, stock_room
from xquant.serve.described import described, left_to_torch

SMOLLM2 = Model(shape_config("smollm2"), torch.bfloat16)


def _told(model: Model, context: int, **asked: str) -> str:
    wanted = fit.wanted(asked)
    codecs = fit.check_model(wanted, model)
    return described(wanted, model, codecs, room_of(codecs, wanted.retention(), model), context)


def test_it_says_what_fits_and_what_reads_it() -> None:
    line = _told(SMOLLM2, 8192, xquant="kivi-4bit:sink=4", xquant_kernel="reference")
    assert line.startswith("kivi-4bit:sink=4 in 30 layers, read by reference (asked for). ")
    wanted = fit.wanted({"xquant": "kivi-4bit:sink=4"})
    room = room_of(fit.check_model(wanted, SMOLLM2), wanted.retention(), SMOLLM2)
    times = room.tokens(10**12, 8192) / stock_room(SMOLLM2).tokens(10**12, 8192)
    assert f"{sum(room.pages) / 128 / 1000:.2f} KB a token, {times:.2f} times" in line and 3 < times < 4
    assert "newest tokens, up to 128," in line and "the first 4 tokens (sinks)" in line
    assert "window" not in line


def test_it_says_what_is_not_compressed() -> None:
    model = Model(tiny("gemma3").config, torch.bfloat16)
    line = _told(model, 512, xquant="kivi-4bit:group=32,tail=64", xquant_kernel="reference")
    [(window, layers)] = model.windows.items()
    assert f"{layers} layers with windows of {window.tokens} tokens, which vLLM keeps itself" in line
    assert "up to 96," in line


@pytest.mark.parametrize("absent", [False, True])
def test_kernels_that_are_missing_are_told_of(absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if absent:
        monkeypatch.setattr(cpu.library, "library", lambda: None)
        monkeypatch.setattr(cpu.library, "absence", lambda: "nobody built it")
    elif not cpu.library.isas():
        pytest.skip("there are none here")
    model = tiny("llama", head_dim=32)
    known, layers = Model(model.config, torch.float32), view_model(model).compressed
    cases = {("kivi-4bit", "auto"): "nobody built it", ("full", "auto"): "", ("kivi-4bit", "reference"): ""}
    for (spec, kernel), why in cases.items():
        wanted = fit.wanted({"xquant": spec, "xquant_kernel": kernel})
        codecs = fit.codecs_for(wanted, known, layers, 0)
        assert left_to_torch(wanted, codecs, 128) == (why if absent else "")
        line = described(wanted, known, codecs, room_of(codecs, wanted.retention(), known), 8192)
        native = kernel == "auto" and spec != "full" and not absent
        assert (f"read by {cpu.best().name}." in line) == native
