"""Plain transformers and LMCache's SDK: states that one process stores, and another reads of a folder.

    .venv-serve/bin/python benchmarks/lmcache_sdk.py --text FILE --json FILE

For each serde of LMCache's second tier, the SDK gives a first server the keys and values of windows of a
text. A second server, which has but the folder, gives them back, and transformers goes on from them greedily.
What is told of each: bytes, tokens that were found, the error of keys and values, and how many greedy tokens
are those that follow the states as they were. The serdes are those of `across_machines`.

The SDK asks the server for the layout of an engine, and does not know the one of vLLM's backend for CPUs. So
what vLLM has on a GPU is registered here by LMCache's own client, without an engine.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from across_machines import ANSWER, CHUNK, NONE, agreed, serdes_of, server, wait_for
from torch import Tensor
from transformers import DynamicCache

from xquant import load_model
from xquant.load import packaged_folder
from xquant.results import stamp, write_json
from xquant.text import cut_windows, read_text, text_name

BLOCK = 16
"""Tokens of a block of the engine that is registered."""


@click.command()
@click.option(
    "--method",
    "specs",
    multiple=True,
    default=["int8", "kivi-4bit:rope=post", "kivi-2bit:rope=post"],
    show_default=True,
)
@click.option("--text", required=True, help="A file, or help-topics.")
@click.option("--context", default=1000, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=4, show_default=True)
@click.option("--json", "target", required=True)
def main(specs: tuple[str, ...], text: str, context: int, windows: int, target: str) -> None:
    model, tokenizer = load_model("smollm2")
    ids = cut_windows(model, tokenizer, read_text(text), context, windows)
    place, whole = str(packaged_folder()), context // CHUNK * CHUNK
    exact = [_states(model, window[:whole]) for window in ids]
    wanted = [_answer(model, window, held) for window, held in zip(ids, exact, strict=True)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for serde, options in serdes_of(place, specs).items():
            folder = Path(name) / serde
            folder.mkdir()
            with _connected(folder, options, model, place) as sdk:
                for window, held in zip(ids, exact, strict=True):
                    sdk.store(held, window[:whole].tolist())
                wait_for(folder, windows * whole // CHUNK)
            with _connected(folder, options, model, place) as sdk:
                found = [sdk.retrieve(window[:whole].tolist()) for window in ids]
            sizes = [file.stat().st_size for file in folder.glob("*.data")]
            row = {"serde": serde, "chunks": len(sizes), "bytes": sum(sizes)}
            row |= {"bf16_bytes": len(sizes) * exact[0][:, :, :CHUNK].numel() * 2, "asked": windows * whole}
            row |= {"hits": [sum(0 if held is None else held.shape[2] for held in found)]}
            if all(held is not None for held in found):
                answers = [_answer(model, window, held) for window, held in zip(ids, found, strict=True)]
                row |= {"same_tokens": [agreed(wanted, answers)], "tokens": ANSWER * windows}
                row |= _errors(torch.stack(exact), torch.stack(found)) if serde != NONE else {}
            rows.append(row)
            click.echo(str(row))
    subject = {"context": context, "windows": windows, "dtype": "float32", "text": text_name(text)}
    write_json(target, stamp(rows, model="smollm2", lmcache=version("lmcache"), **subject))


def _states(model: Any, ids: Tensor) -> Tensor:
    """Keys and values ``[2, L, T, G D]`` of these tokens."""
    cache = DynamicCache(config=model.config)
    model(ids[None], past_key_values=cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    kinds = zip(*pairs, strict=True)
    return torch.stack([torch.cat(kind).transpose(1, 2).flatten(2) for kind in kinds])


def _answer(model: Any, ids: Tensor, held: Tensor) -> list[int]:
    """Greedy tokens after ``ids``, the first of which are in ``held``."""
    cache, heads = DynamicCache(config=model.config), model.config.num_key_value_heads
    for index, (keys, values) in enumerate(held.unflatten(3, (heads, -1)).transpose(2, 3).transpose(0, 1)):
        cache.update(keys[None], values[None], index)
    more = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
    found: Tensor = model.generate(ids[None], past_key_values=cache, **more)
    return found[0, len(ids) :].tolist()


def _errors(exact: Tensor, found: Tensor) -> dict[str, float]:
    """Of keys and of values ``[windows, 2, L, T, G D]``, relative to their norm."""
    over = (0, 2, 3, 4)
    keys, values = ((found - exact).square().sum(over) / exact.square().sum(over)).sqrt().tolist()
    return {"key_error": keys, "value_error": values}


@contextmanager
def _connected(folder: Path, serde: dict[str, Any] | None, model: Any, place: str) -> Iterator[Any]:
    """LMCache's SDK, at a server over this folder."""
    from lmcache.sdk.kvcache import connect

    with server(folder, serde, "--supported-transfer-mode", "auto") as ports:
        address = f"tcp://127.0.0.1:{ports.engines}"
        engine = _registered(address, model, place)
        sdk = connect(address, f"http://127.0.0.1:{ports.http}", place)
        yield sdk
        sdk.close()
        engine.close()


def _registered(address: str, model: Any, place: str) -> Any:
    """An engine with pages ``[pages, 2, G, BLOCK, D]``, which the server knows from now on."""
    import zmq
    from lmcache.v1.gpu_connector.utils import LayoutHints
    from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    heads, size = model.config.num_key_value_heads, model.config.head_dim
    page = torch.zeros(1, 2, heads, BLOCK, size, dtype=model.dtype)
    pages = {f"layer.{index}": page.clone() for index in range(model.config.num_hidden_layers)}
    client = RequestClientFactory.create(address, context=zmq.Context())
    engine = create_transfer_context(pages, instance_id=1, req_client=client, mode="lmcache_driven")
    hints = LayoutHints(kv_layout="HND", num_kv_heads=heads, tokens_per_block=BLOCK, head_dim=size)
    engine.register(pages, place, 1, CHUNK // BLOCK, 60.0, layout_hints=hints)
    return engine


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
