"""A connector's folder that others damage, fill and remove, and a server that is killed, under load. Run by
`make serve-stress`."""

import json
import os
import random
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import connector, random_prompts, save_tiny
from support.vllm_server import Server, command_of, served
from xquant import load_model

PORT, CLIENTS, SECONDS = 8767, 8, 20
PROMPTS = random_prompts([400] * 24, seed=2)
FULL = 3 << 20
"""Bytes of a disk on which some of the prompts find no room."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of SmolLM2's words."""
    _, tokenizer = load_model("smollm2")
    found = save_tiny(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def want(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers, of a server whom nobody disturbs."""
    with served(_command(model, tmp_path_factory.mktemp("whole")), PORT) as server:
        return [_ask(server, number) for number in range(len(PROMPTS))]


def _command(model: Path, store: Path, **options: str) -> list[str]:
    # A pool that keeps little, so that blocks are read from the folder.
    more = ["--kv-cache-memory-bytes", "8000000", "--kv-transfer-config"]
    more += [json.dumps(connector(store, **options)["kv_transfer_config"])]
    return command_of(model, PORT, CLIENTS, *more, xquant="full", xquant_attend="store")


def _ask(server: Server, number: int) -> str:
    asked = {"model": "served", "prompt": PROMPTS[number], "max_tokens": 8, "temperature": 0}
    data, kind = json.dumps(asked).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.address}/v1/completions", data, kind)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


class Load:
    """Clients that ask until it ends."""

    def __init__(self, server: Server, want: list[str]) -> None:
        self._server, self._want = server, want
        self._done = threading.Event()
        self.right, self.wrong, self.failures = 0, list[str](), list[str]()

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._done.is_set():
            number = draw.randrange(len(PROMPTS))
            try:
                found = _ask(self._server, number)
            except Exception as error:
                self.failures.append(repr(error))
                time.sleep(0.1)
                continue
            if found == self._want[number]:
                self.right += 1
            else:
                self.wrong.append(f"{found!r}, not {self._want[number]!r}")

    @contextmanager
    def going(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in threads:
                thread.join()


def test_a_folder_that_is_damaged_and_removed(model: Path, want: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    with served(_command(model, store), PORT) as server:
        load = Load(server, want)
        with load.going():
            _spoil(store)
        assert not load.failures and not load.wrong and load.right > 3 * CLIENTS
        assert server.is_well()
        for name in ("stored", "loaded", "damaged"):
            assert server.counted(f"xquant_blocks_{name}_total") > 0, name


def test_a_disk_that_is_full(model: Path, want: list[str], tmp_path: Path) -> None:
    store = tmp_path / "small"
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", str(store)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        # By default it would take half of the disk.
        with served(_command(model, store / "blocks", limit="1GB"), PORT) as server:
            load = Load(server, want)
            with load.going():
                time.sleep(SECONDS)
            assert not load.failures and not load.wrong and load.right > 3 * CLIENTS
            assert server.is_well()
            for name in ("stored", "left_out"):
                assert server.counted(f"xquant_blocks_{name}_total") > 0, name
    finally:
        subprocess.run(["umount", str(store)], check=False)


def test_a_server_that_is_killed(model: Path, want: list[str], tmp_path: Path) -> None:
    """What it had begun to write when it was killed does no harm to the next one."""
    store = tmp_path / "store"
    for seconds in (1, 3):
        server = Server(_command(model, store), PORT)
        load = Load(server, want)
        with load.going():
            time.sleep(seconds)
            server.kill()
        assert not load.wrong
    with served(_command(model, store), PORT) as server:
        load = Load(server, want)
        with load.going():
            time.sleep(SECONDS)
        assert not load.failures and not load.wrong and load.right > 3 * CLIENTS
        assert server.is_well()
        assert server.counted("xquant_blocks_loaded_total") > 0
        assert server.counted("xquant_blocks_damaged_total") == 0


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
