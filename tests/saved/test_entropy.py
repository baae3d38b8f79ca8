"""Entropy coding of saved caches: smaller files, and the same caches."""

import sys
from pathlib import Path

import pytest
import torch

from support.caches import make_cache
from support.models import prompt, tiny
from support.saved_caches import SOME, lived, loaded, model_of
from xquant import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [*SOME, "tc-3bit:group=32", "kivi-4bit:group=32", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_entropy_coding_loses_nothing(family: str, spec: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(family, dtype)
    run = lived(model, make_cache(model, spec))
    other = loaded(run.cache, tmp_path / "c", pack="entropy")
    for mine, theirs in zip(run.cache.compressed, other.compressed, strict=True):
        for ours, held in zip(mine.stream.pool, theirs.stream.pool, strict=True):
            every = torch.arange(mine.stream.blocks)
            for name, fields in ours.items():
                pairs = (
                    zip(fields.blocks, held[name].blocks, strict=True)
                    if name in ("outlier_excess", "outlier_channel")
                    else [(fields[every], held[name][every])]
                )
                assert all(torch.equal(*pair) for pair in pairs)
    assert run.same_with(other)


def test_entropy_coding_makes_a_file_smaller(tmp_path: Path) -> None:
    model = tiny("llama", head_dim=32, hidden_size=256)
    for spec in ("kivi-2bit:group=32", "tc-2bit:group=32", "full"):
        cache = make_cache(model, spec)
        with torch.inference_mode():
            model(prompt(2, 512), past_key_values=cache)
        sizes = []
        for pack in (None, "entropy"):
            cache.save(tmp_path / "c", pack=pack)
            sizes.append((tmp_path / "c").stat().st_size)
        assert sizes[1] < 0.97 * sizes[0], (spec, sizes)
    with pytest.raises(ValueError, match="pack is None or 'entropy', not 'zip'"):
        cache.save(tmp_path / "other", pack="zip")
    assert not (tmp_path / "other").exists()


def test_entropy_coding_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[entropy\]'"):
        KVCache(model_of("llama"), "int8").save(tmp_path / "c", pack="entropy")
    assert not list(tmp_path.iterdir())
