"""A connector's folder that others damage and remove, under load. Run by `make serve-stress`."""

import json
import random
import shutil
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import connector, random_prompts, save_tiny
from support.vllm_server import command_of, is_well, served
from xquant import load_model

PORT, CLIENTS, SECONDS = 8767, 8, 20


def test_every_answer_is_right(tmp_path: Path) -> None:
    """Bits are flipped, and files and the folder are removed."""
    _, tokenizer = load_model("smollm2")
    model, store = save_tiny(tmp_path / "model", vocab_size=len(tokenizer)), tmp_path / "store"
    tokenizer.save_pretrained(model)
    # A pool that keeps little, so that blocks are read from the folder.
    more = ["--kv-cache-memory-bytes", "8000000", "--kv-transfer-config"]
    more += [json.dumps(connector(store)["kv_transfer_config"])]
    prompts = random_prompts([400] * 24, seed=2)
    with served(
        command_of(model, PORT, CLIENTS, *more, xquant="full", xquant_attend="store"), PORT
    ) as address:

        def ask(number: int) -> str:
            asked = {"model": "served", "prompt": prompts[number], "max_tokens": 8, "temperature": 0}
            data, kind = json.dumps(asked).encode(), {"content-type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", data, kind)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return str(json.load(answer)["choices"][0]["text"])

        want = [ask(number) for number in range(len(prompts))]
        done, right, failures = threading.Event(), [0], list[str]()

        def client(seed: int) -> None:
            draw = random.Random(seed)
            while not done.is_set():
                number = draw.randrange(len(prompts))
                try:
                    assert ask(number) == want[number]
                    right[0] += 1
                except Exception as error:
                    failures.append(repr(error))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        _spoil(store)
        done.set()
        for thread in threads:
            thread.join()
        assert not failures and right[0] > 3 * CLIENTS
        assert is_well(address)
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        for name in ("stored", "loaded", "damaged"):
            [line] = [each for each in lines if each.startswith(f"vllm:xquant_blocks_{name}_total{{")]
            assert float(line.split()[-1]) > 0, name


def _spoil(store: Path) -> None:
    draw = random.Random(0)
    for second in range(SECONDS):
        time.sleep(1)
        with suppress(OSError):
            if second % 5 == 4:
                shutil.rmtree(store)
        for file in store.glob("*.safetensors"):
            with suppress(OSError):
                if draw.random() < 0.2:
                    file.unlink()
                elif draw.random() < 0.3:
                    content = bytearray(file.read_bytes())
                    content[draw.randrange(len(content))] ^= 1
                    file.write_bytes(content)
