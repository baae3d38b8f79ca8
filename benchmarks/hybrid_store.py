"""Bytes at rest of a hybrid model, by how far its checkpoints lie apart.

    python benchmarks/hybrid_store.py --json results.json

The model keeps what Qwen3-Next-80B keeps of a token, and in its states, in a quarter of its layers: 3 of full
attention with 2 heads of 256, 9 of linear attention with 32 heads of 128 x 128. Its weights are random and
narrow: what is stored depends on neither. It reads some tokens, which are stored with one checkpoint at their
end. Chunks are as large wherever they lie, and so are checkpoints: from the bytes of these files follow those
of a longer prompt with a checkpoint every so many tokens, times four for 48 layers. In bf16 a cache holds
keys, values and convolutions in 2 bytes a number, and recurrent states in 4, as transformers keeps them.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from xquant import Calibration, KVCache, PrefixStore, calibrate, load_model, parse_method
from xquant.cli.prompt import fill
from xquant.progress import silent
from xquant.results import stamp, write_json
from xquant.saved.prefix_names import is_checkpoint
from xquant.text import cut_windows, read_text

EVERY = 1024
METHODS = "full", "kivi-4bit", "tc-2bit", "tc-cl-2bit"
PERIODS, OF_MODEL = 3, 12
"""Periods of three layers of linear attention and one of full attention, here and in Qwen3-Next-80B."""


@click.command()
@click.option("--read", default=4096, show_default=True, help="Tokens that are read and stored.")
@click.option("--tokens", default=32768, show_default=True, help="Of the prompt whose bytes are told.")
@click.option("--json", "target", required=True)
def main(read: int, tokens: int, target: str) -> None:
    _, tokenizer = load_model("smollm2")
    model = _model(len(tokenizer))
    text = read_text("help-topics")
    ids = cut_windows(model, tokenizer, text, read, 1)
    rows: list[dict[str, Any]] = []
    for spec in METHODS:
        made = None
        if parse_method(spec).needs_calibration:
            made = calibrate(model, tokenizer, spec, text, 256, 2)
        cache = KVCache(model, spec, calibration=made)
        fill(cache, ids, silent)
        for bits in (8, 16):
            rows += _stored(cache, made, bits, ids, tokens)
    write_json(target, stamp(rows, model="Qwen3-Next-80B, its cache", tokens=tokens, dtype="bfloat16"))


def _stored(cache: KVCache, made: Calibration | None, bits: int, ids: Tensor, tokens: int) -> Any:
    """Rows of a method, one for each distance of checkpoints."""
    scale, spec, model = OF_MODEL // PERIODS, cache.method.spec, cache.attachment.view.model
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(folder, model, spec, calibration=made, state_bits=bits)
        assert store.put(cache, ids) == [ids.shape[1]]
        sizes = {file.stem: file.stat().st_size for file in Path(folder).glob("*.safetensors")}
        chunk = store.chunk
    (checkpoint,) = (size for name, size in sizes.items() if is_checkpoint(name))
    each = statistics.mean(size for name, size in sizes.items() if not is_checkpoint(name))
    chunks = scale * each * tokens / chunk
    values = sum(layer.codec.view.state_width for layer in cache.compressed)
    in_bf16 = scale * (2 * values * tokens + cache.report().skipped_bytes)
    every = EVERY
    while every <= tokens:
        kept = scale * checkpoint * (tokens // every)
        row = {"method": spec, "state_bits": bits, "every": every, "bytes": chunks + kept}
        row |= {"chunk_bytes": chunks, "checkpoint_bytes": scale * checkpoint, "bf16_bytes": in_bf16}
        click.echo(f"{spec:11} {bits:3} {every:6} {(chunks + kept) / 1e6:8.1f} MB of {in_bf16 / 1e6:.1f}")
        yield row
        every *= 2


def _model(vocabulary: int) -> Any:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3NextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=len(kinds) * PERIODS,
        layer_types=kinds * PERIODS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=65536,
    )
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(config).to(torch.bfloat16).eval()


if __name__ == "__main__":
    main()
