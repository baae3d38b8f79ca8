"""Saved caches and chunks that others write, replace or spoil meanwhile."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import prompt, tiny
from test_prefixes import SPEC, filled, model_of, store_of
from xquant import KVCache
from xquant.saved import header, reading


def caches(model: Any) -> tuple[KVCache, KVCache]:
    """Two of one shape, so that only their numbers tell them apart."""
    return filled(model, SPEC, prompt(1, 70, seed=1)), filled(model, SPEC, prompt(1, 70, seed=2))


@pytest.mark.parametrize("moment", [(header, "_parsed"), (reading, "check_model")], ids=str)
def test_a_file_that_is_replaced_while_it_is_loaded(
    moment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = tiny("llama", num_hidden_layers=2), tmp_path / "c"
    one, other = caches(model)
    one.save(file)
    usual = getattr(*moment)

    def replaced(*args: Any) -> Any:
        other.save(file)
        return usual(*args)

    monkeypatch.setattr(*moment, replaced)
    found = KVCache.load(model, file)
    monkeypatch.undo()
    for mine, theirs in zip(found.compressed, one.compressed, strict=True):
        assert torch.equal(mine.tail, theirs.tail)
    again = KVCache.load(model, file)
    assert torch.equal(again.compressed[0].tail, other.compressed[0].tail)


def test_threads_that_save_to_one_path_and_load_it(tmp_path: Path) -> None:
    model, errors = tiny("llama", num_hidden_layers=2), list[BaseException]()

    def work(cache: KVCache) -> None:
        try:
            for _ in range(20):
                cache.save(tmp_path / "c")
                assert KVCache.load(model, tmp_path / "c").get_seq_length() == 70
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches(model)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("place", ["folder", "full folder", "circle", "link to nothing"])
def test_what_is_no_file_in_the_place_of_a_chunk(place: str, tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 300)
    store, cache = store_of(tmp_path, model, SPEC), filled(model, SPEC, ids)
    assert store.put(cache, ids) == [256]
    names = store._names(ids[0], long=False).chunks
    second = store._shelf._path(names[1])
    second.unlink()
    if "folder" in place:
        second.mkdir()
        if place == "full folder":
            (second / "a").touch()
    else:
        second.symlink_to(second if place == "circle" else tmp_path / "nothing")
    with pytest.warns(UserWarning, match="is damaged .it is no file.: it "):
        found = store.get(ids)
    assert found is not None and found.get_seq_length() == 128
    again = store_of(tmp_path, model, SPEC)
    if "folder" in place:
        with pytest.warns(UserWarning, match="it cannot be removed"):
            assert again.put(cache, ids) == [128]
        assert second.is_dir()
    else:
        assert again.put(cache, ids) == [256]


def test_ids_that_are_none_are_refused(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 300)
    store, cache = store_of(tmp_path, model, SPEC), filled(model, SPEC, ids)
    for wrong in (None, "a text", object()):
        with pytest.raises(TypeError, match="ids of tokens are needed, not"):
            store.put(cache, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ids of tokens are needed, not"):
            store.get(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a KVCache is needed, not NoneType"):
        store.put(None, ids)  # type: ignore[arg-type]


def test_a_chunk_of_another_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a file was used can be set by its owner alone."""
    model, ids = model_of("llama"), prompt(1, 300)
    store, cache = store_of(tmp_path, model, SPEC), filled(model, SPEC, ids)
    store.put(cache, ids)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("os.utime", refuse)
    found = store.get(ids)
    assert found is not None and found.get_seq_length() == 256
    assert store.put(cache, ids) == [256]
