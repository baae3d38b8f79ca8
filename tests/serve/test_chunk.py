"""ChunkCoder: a chunk comes back as the method reads it, and nothing else comes back at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration, rows_held
from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.serve.build import Model
from xquant.serve.chunk import ChunkCoder
from xquant.serve.fit import Wanted

BLOCK, TOKENS, CHUNKS = 32, 64, 2
IDS = prompt(1, TOKENS * CHUNKS)
ANYWHERE = ["kivi-4bit:group=32,rope=post", "int8:group=32", "full:group=32"]
PLACED = [
    "kivi-2bit:group=32,sink=2",
    "tc-2bit:group=32,sink=2",
    *("tc-cl-2bit:group=32", "tc-2bit:group=32,classes=2"),
    "kvquant-2bit-1%:group=32",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=64)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    model.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def states(model: Any) -> Tensor:
    """Rotated keys beside values ``[L, T, W]`` of all tokens."""
    cache = KVCache(model, "full:group=32")
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    return torch.stack(rows_held(cache))


def wanted_of(model: Any, spec: str, folder: Path) -> Wanted:
    made = calibration(model, spec)
    if made is None:
        return Wanted(parse_method(spec))
    file = folder / "calibration.safetensors"
    made.save(file)
    return Wanted(parse_method(spec), calibration=str(file))


def coder_of(model: Any, spec: str, folder: Path, place: Path, tokens: int = TOKENS) -> ChunkCoder:
    known = Model(model.config, torch.float32, str(folder))
    return ChunkCoder(known, wanted_of(model, spec, place), tokens)


def where(number: int) -> tuple[int, list[int]]:
    """The position and the ids of a chunk."""
    start = number * TOKENS
    return start, IDS[0, start : start + TOKENS].tolist()


@pytest.mark.parametrize("spec", [*ANYWHERE, *PLACED])
def test_chunks_come_back_as_the_method_reads_them(
    model: Any, folder: Path, states: Tensor, tmp_path: Path, spec: str
) -> None:
    coder, again = (coder_of(model, spec, folder, tmp_path) for _ in range(2))
    assert coder.needs_positions == (spec in PLACED)
    cache = KVCache(model, spec, calibration=calibration(model, spec))
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    bits, sinks = cache.report().bits_per_value, parse_method(spec).sink
    for number in range(CHUNKS):
        start, ids = where(number)
        rows = states[:, start : start + TOKENS]
        held = coder.encode(rows, start, ids)
        assert held.shape == (coder.nbytes,)
        assert held.nbytes < rows.nbytes or spec.startswith("full")
        found = again.decode(held.clone(), start)
        error = (found - rows).norm() / rows.norm()
        assert error < (1e-3 if spec.startswith("full") else 0.02 if bits > 8 else 0.7)
        if number == 0 and sinks:
            assert torch.equal(found[:, :sinks], rows[:, :sinks])
        assert torch.equal(again.decode(held), found)


@pytest.mark.parametrize("spec", PLACED)
def test_positions_are_never_assumed(
    model: Any, folder: Path, states: Tensor, tmp_path: Path, spec: str
) -> None:
    coder, rows = coder_of(model, spec, folder, tmp_path), states[:, TOKENS:]
    start, ids = where(1)
    with pytest.raises(ValueError, match="are unknown"):
        coder.encode(rows, None, ids)
    held = coder.encode(rows, start, ids)
    with pytest.raises(ValueError, match="begins at position 64, not 0"):
        coder.decode(held, 0)
    if coder.needs_ids:
        for some in (None, ids[:-1]):
            with pytest.raises(ValueError, match="are unknown"):
                coder.encode(rows, start, some)
    longest = coder_of(model, spec, folder, tmp_path)._longest
    with pytest.raises(ValueError, match="is past"):
        coder.encode(rows, longest - 1, ids)


def test_a_chunk_of_anything_else_is_refused(
    model: Any, folder: Path, states: Tensor, tmp_path: Path
) -> None:
    spec, rows = "kivi-4bit:group=32,rope=post", states[:, :TOKENS]
    coder = coder_of(model, spec, folder, tmp_path)
    held = coder.encode(rows)
    for at in (0, 5, 40, 60, 200, len(held) - 1):
        altered = held.clone()
        altered[at] ^= 1
        with pytest.raises(ValueError, match=r"is damaged|is of another model|begins at position"):
            coder.decode(altered, 64)
    for wrong in (held[:-1], held.int()):
        with pytest.raises(ValueError, match="a chunk has"):
            coder.decode(wrong)
    other = tiny("llama", head_dim=32, hidden_size=64)
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    for reader in (
        coder_of(other, spec, tmp_path / "other", tmp_path),
        coder_of(model, "kivi-4bit:group=32,rope=post,sink=0,tail=32", folder, tmp_path),
    ):
        if reader.nbytes == coder.nbytes:
            with pytest.raises(ValueError, match="is of another model"):
                reader.decode(held)
    for states_of in (rows[:, :32], rows.half()):
        with pytest.raises(ValueError, match="a chunk is"):
            coder.encode(states_of)
    with pytest.raises(ValueError, match="NaN"):
        coder.encode(rows.masked_fill(rows == rows[0, 0, 0], torch.nan))
    for tokens in (48, 0):
        with pytest.raises(ValueError, match="are no whole blocks"):
            coder_of(model, spec, folder, tmp_path, tokens)


def test_another_calibration_is_another_chunk(
    model: Any, folder: Path, states: Tensor, tmp_path: Path
) -> None:
    coder = coder_of(model, "tc-2bit:group=32", folder, tmp_path)
    made = calibration(model, "tc-2bit:group=32")
    assert made is not None
    name = max(made.tensors, key=lambda name: made.tensors[name].numel())
    made = type(made)(
        {**made.tensors, name: made.tensors[name] * 1.01},
        made.method,
        model=made.model,
        text=made.text,
        version=made.version,
    )
    made.save(tmp_path / "other")
    known = Model(model.config, torch.float32, str(folder))
    wanted = Wanted(parse_method("tc-2bit:group=32"), calibration=str(tmp_path / "other"))
    other = ChunkCoder(known, wanted, TOKENS)
    with pytest.raises(ValueError, match="another model, method, calibration"):
        other.decode(coder.encode(states[:, :TOKENS], *where(0)))
