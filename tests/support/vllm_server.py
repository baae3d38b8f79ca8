"""vLLM's OpenAI server in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def command_of(folder: Path, port: int, requests: int, *more: str, **own: Any) -> list[str]:
    """That starts it; ``more``: options in place of these; ``own``: of ``additional_config``."""
    options = {
        "model": folder,
        "served-model-name": "served",
        "port": port,
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": requests,
        "kv-cache-memory-bytes": 48 << 20,
        "additional-config": json.dumps({"xquant_kernel": "reference", **own}),
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *given, *more]


def environment() -> dict[str, str]:
    """Of the server: its engine has a process, too."""
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


class Server:
    """One that answers at ``address``."""

    def __init__(self, command: list[str], port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command, env=environment(), start_new_session=True)
        for _ in range(900):
            if self.is_well() or self._process.poll() is not None:
                break
            time.sleep(1)
        assert self._process.poll() is None

    def is_well(self) -> bool:
        """Whether it says so."""
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def counted(self, name: str) -> float:
        """A metric of vLLM's, over all labels."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def kill(self) -> None:
        """End all its processes at once, as the kernel does where memory is short."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


@contextmanager
def served(command: list[str], port: int) -> Iterator[Server]:
    """A server, for as long as it is needed."""
    server = Server(command, port)
    try:
        yield server
    finally:
        server.stop()
