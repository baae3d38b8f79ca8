"""vLLM's OpenAI server with xquant: many chats at once, clients that leave, requests that are too long. Run
by `make serve-stress`."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import openai

from support.vllm_engines import save_tiny
from support.vllm_server import Server, command_of, environment, served
from xquant import load_model

PORT = 8765
CHATS = 16
SYSTEM = "You answer questions about steam engines, shortly and in whole sentences. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of SmolLM2's words."""
    _, tokenizer = load_model("smollm2")
    found = save_tiny(tmp_path_factory.mktemp("served"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    command = command_of(folder, PORT, CHATS, xquant="kivi-4bit", xquant_attend="store")
    with served(command, PORT) as found:
        yield found


def _address(server: Server) -> str:
    """Of its OpenAI interface."""
    return f"{server.address}/v1"


async def _chat(client: Any, number: int, tokens: int = 20) -> str:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Question {number}: what does part {number * 7} do?"},
    ]
    stream = await client.chat.completions.create(
        model="served",
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return "".join(parts)


def test_chats_at_once_answer_as_one_at_a_time(server: Server) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=_address(server), api_key="none") as client:
            together = await asyncio.gather(*(_chat(client, number) for number in range(CHATS)))
            alone = [await _chat(client, number) for number in range(CHATS)]
        return list(together), alone

    together, alone = asyncio.run(run())
    assert together == alone
    assert len(set(together)) > 1
    assert server.counted("prefix_cache_hits_total") > 0


def test_a_client_that_leaves_frees_its_pages(server: Server) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=_address(server), api_key="none") as client:
            stream = await client.completions.create(
                model="served",
                prompt="a " * 300,
                max_tokens=600,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    for _ in range(120):
        if not server.counted("num_requests_running") and not server.counted("kv_cache_usage_perc"):
            break
        time.sleep(0.5)
    assert server.counted("num_requests_running") == 0
    assert server.counted("kv_cache_usage_perc") == 0


def test_what_is_too_long_is_refused_and_the_server_goes_on(server: Server) -> None:
    with openai.OpenAI(base_url=_address(server), api_key="none") as client:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="served", prompt="a " * 1500, max_tokens=8)
        found = client.completions.create(model="served", prompt="a b c", max_tokens=8)
    assert found.usage.completion_tokens == 8


def test_a_refusal_is_one_line(folder: Path) -> None:
    done = subprocess.run(
        command_of(folder, PORT + 1, CHATS, xquant="kivi-9bit"),
        env={**environment(), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode
    assert "Traceback" not in done.stderr
    refused = [line for line in done.stderr.splitlines() if "xquant" in line]
    assert len(refused) == 1 and refused[0].startswith("xquant: kivi: bits=9")
