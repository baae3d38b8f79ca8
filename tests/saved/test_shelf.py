"""Prefixes on disk: the limit, damage, and processes that are killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from support.models import prompt
from support.processes import import_path
from support.saved_caches import two_layers
from test_prefixes import SPEC, filled, model_of, store_of
from xquant import PrefixStore


def test_the_least_recently_used_goes_first_and_of_a_prompt_the_end(tmp_path: Path) -> None:
    model = model_of("llama")
    prompts = [prompt(1, 300, seed=seed) for seed in range(4)]
    size = PrefixStore(tmp_path / "one", model, SPEC)
    size.put(filled(model, SPEC, prompts[0]), prompts[0])
    limit = 4 * size.nbytes - 100
    store = store_of(tmp_path / "all", model, SPEC, limit)
    for ids in prompts[:3]:
        store.put(filled(model, SPEC, ids), ids)
        time.sleep(0.02)
    store.get(prompts[0])
    assert store.put(filled(model, SPEC, prompts[3]), prompts[3]) == [256]
    lengths = [0 if found is None else found.get_seq_length() for found in map(store.get, prompts)]
    assert lengths == [256, 128, 256, 256] and store.nbytes <= limit
    smaller = store_of(tmp_path / "all", model, SPEC, 2 * size.nbytes)
    assert smaller.nbytes <= 2 * size.nbytes
    long = prompt(1, 900)
    assert smaller.put(filled(model, SPEC, long), long) == [512]
    assert store_of(tmp_path / "all", model, SPEC, 100).put(filled(model, SPEC, long), long) == [0]


def test_a_damaged_file_is_left_out_with_a_warning_and_removed(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(1, 700)
    store, cache, draw = store_of(tmp_path, model, SPEC), filled(model, SPEC, ids), random.Random(3)
    store.put(cache, ids)
    whole = {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    assert len(whole) == 5
    for number in range(60):
        file = draw.choice(list(whole))
        content = bytearray(whole[file])
        if number % 3:
            at = draw.randrange(len(content) if number % 3 == 1 else 300)
            content[at] ^= 1 << draw.randrange(8)
        else:
            del content[draw.choice((0, 5, 300, len(content) - 1)) :]
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="is damaged .* it is removed"):
            found = store.get(ids)
        length = 0 if found is None else found.get_seq_length()
        assert length < 640 and length % 128 == 0 and not file.exists()
        assert store.put(cache, ids) == [640]
    assert {file: file.read_bytes() for file in whole} == whole


def test_a_chunk_of_something_else_is_left_out(tmp_path: Path) -> None:
    """Its digest is right, and what it holds is not."""
    model, ids = model_of("llama"), prompt(1, 300)
    store, cache = store_of(tmp_path, model, SPEC), filled(model, SPEC, ids)
    store.put(cache, ids)
    names, shelf = store._names(ids[0], long=False).chunks, store._shelf
    right = shelf.get(names[1])
    assert right is not None
    for change in (
        {},
        {"packed": right["packed"][:-1]},
        {"packed": torch.cat([right["packed"], right["packed"][:1]])},
        {"packed": right["packed"].float()},
        {"sinks": torch.zeros(3)},
        {"sinks": right["sinks"].int()},
        {"sinks": right["sinks"].half()},
        {"features": right["features"].half()},
        {"features": right["features"].int()},
        {"bases": torch.ones(2, dtype=torch.float64)},
        {"more": torch.ones(2)},
    ):
        shelf._path(names[1]).unlink()
        shelf.put(names[1:2], lambda _, change=change: {**right, **change} if change else {})
        with pytest.warns(UserWarning, match="is damaged"):
            found = store.get(ids)
        assert found is not None and found.get_seq_length() == 128
        assert store.put(cache, ids) == [256]


WORKER = """
import random, sys
import torch
from support.models import prompt, tiny
from support.saved_caches import two_layers
from xquant import KVCache, PrefixStore
torch.set_num_threads(1)
SPEC, folder, limit, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model, draw = two_layers(sys.argv[5]), random.Random(seed)
store = PrefixStore(folder, model, SPEC, limit)
caches = {}
def cache_of(number):
    if number not in caches:
        ids = prompt(1, 420, seed=number)
        cache = KVCache(model, SPEC)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        caches[number] = ids, cache
    return caches[number]
print("ready", flush=True)
while True:
    ids, cache = cache_of(draw.randrange(12))
    if draw.random() < 0.5:
        store.put(cache, ids)
        assert store.nbytes <= limit
        print("put", flush=True)
    else:
        found = store.get(torch.cat([ids, ids[:, :1]], 1))
        if found is not None:
            length = found.get_seq_length()
            for mine, other in zip(cache.compressed, found.compressed, strict=True):
                blocks = torch.arange(length // 32)
                for ours, theirs in zip(mine.stream.pool, other.stream.pool, strict=True):
                    assert ours.keys() == theirs.keys()
                    assert all(torch.equal(ours[f][blocks], theirs[f][blocks]) for f in ours)
        print("hit" if found is not None else "miss", flush=True)
"""


def bytes_in(folder: Path) -> int:
    """Of the files that are there, unfinished ones too. What a folder takes is the file system's affair."""
    size = 0
    for path in [Path(root, name) for root, _, names in os.walk(folder) for name in names]:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_eight_processes_that_are_killed_at_any_moment(family: str, tmp_path: Path) -> None:
    """What is read is whole and right, and the limit holds at every moment."""
    operations, processes = (500, 8) if "XQUANT_EXAMPLES" in os.environ else (30, 2)
    model = two_layers(family)
    ids = prompt(1, 420, seed=0)
    one = PrefixStore(tmp_path / "one", model, SPEC)
    one.put(filled(model, SPEC, ids), ids)
    limit, folder = 5 * one.nbytes, tmp_path / "all"
    environment = {**os.environ, "PYTHONPATH": import_path(), "PYTHONWARNINGS": "error::UserWarning"}
    counts: dict[str, int] = {"put": 0, "hit": 0, "miss": 0, "killed": 0}
    failures: list[str] = []
    done = threading.Event()

    def live(place: int) -> None:
        draw, life = random.Random(place), 0
        while not done.is_set():
            command = [
                sys.executable,
                "-c",
                WORKER,
                SPEC,
                str(folder),
                str(limit),
                f"{place}{life}",
                family,
            ]
            worker = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            life += 1
            assert worker.stdout is not None and worker.stderr is not None
            left = draw.randrange(5, 25) if life > 1 or place else 10**9
            for line in worker.stdout:
                word = line.strip()
                counts[word] = counts.get(word, 0) + 1
                left -= 1
                if left < 0 or done.is_set():
                    time.sleep(draw.random() * 0.01)
                    worker.send_signal(signal.SIGKILL)
                    break
            error = worker.stderr.read()
            if worker.wait() == -signal.SIGKILL:
                counts["killed"] += 1
            else:
                failures.append(error[-2000:])
                done.set()

    threads = [threading.Thread(target=live, args=(place,)) for place in range(processes)]
    for thread in threads:
        thread.start()
    most = 0
    try:
        while not done.is_set():
            most = max(most, bytes_in(folder))
            if sum(counts[word] for word in ("put", "hit", "miss")) >= operations:
                done.set()
            time.sleep(0.01)
    finally:
        done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert counts["hit"] > operations / 10 and counts["put"] > operations / 10
    assert counts["killed"] >= processes
    store = PrefixStore(folder, model, SPEC, limit)
    assert most <= limit and store.nbytes <= limit
    assert not list(folder.glob(".*.tmp"))


def test_threads_of_one_process(tmp_path: Path) -> None:
    model = model_of("llama")
    prompts = [prompt(1, 300, seed=seed) for seed in range(3)]
    caches = [filled(model, SPEC, ids) for ids in prompts]
    store = store_of(tmp_path, model, SPEC, "100KB")
    errors: list[BaseException] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(20):
                number = draw.randrange(3)
                if draw.random() < 0.5:
                    store.put(caches[number], prompts[number])
                else:
                    store.get(prompts[number], draw.choice((None, "int8")))
                assert store.nbytes <= 100_000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
