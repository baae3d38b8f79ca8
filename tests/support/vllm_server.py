"""vLLM's OpenAI server in a process of its own."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def served(command: list[str], port: int) -> Iterator[str]:
    """The address of a server that answers."""
    process, address = subprocess.Popen(command, env=environment()), f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            if is_well(address) or process.poll() is not None:
                break
            time.sleep(1)
        assert process.poll() is None
        yield address
    finally:
        process.terminate()
        process.wait(60)


def is_well(address: str) -> bool:
    """Whether it says so."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
