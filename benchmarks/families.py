"""Transform coding on other architectures than the one it was made on, beside KIVI and XQuant.

    python benchmarks/families.py --text FILE --json results.json

Of every family a small model is trained on the first nine tenths of the text, all with the same sizes and
windows, saved and loaded as any model is, and measured on the rest as `xquant perplexity` measures. Methods
that calibrate themselves do so on what this model writes. A method that refuses a family leaves a row that
says why. Families that the results file holds, measured in the same way, are not measured again.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    get_cosine_schedule_with_warmup,
)
from transformers.utils import logging

from xquant import KVCache, load_model, own_calibration, parse_method
from xquant.calibrations import Calibrations
from xquant.files import CACHE
from xquant.results import stamp, write_json
from xquant.text import read_text, text_name
from xquant_lab.evals.perplexity import perplexity
from xquant_lab.results.read import read_results

SPECS = (
    *("full", "kivi-2bit", "kivi-4bit", "xquant-2bit", "xquant-4bit", "xquant-cl-2bit"),
    *("tc-2bit", "tc-cl-1.1bit", "tc-cl-2bit", "tc-cl-3bit"),
)
END = "<end>"
CONTEXT = 512
RATE = 3e-3
COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "query_pre_attn_scalar": 64,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, GEMMA),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "mistral": (MistralConfig, {"sliding_window": None}),
}


@click.command()
@click.option("--text", required=True)
@click.option("--family", "families", multiple=True, default=tuple(FAMILIES), show_default=True)
@click.option("--steps", default=600, show_default=True, help="Of a window each.")
@click.option("--windows", default=16, show_default=True, help="Windows that are measured.")
@click.option("--method", "specs", multiple=True, default=SPECS, show_default=True)
@click.option("--json", "target", required=True)
def main(
    text: str,
    families: tuple[str, ...],
    steps: int,
    windows: int,
    specs: tuple[str, ...],
    target: str,
) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    words = read_text(text)
    cut = len(words) * 9 // 10
    training, held_out = words[:cut], words[cut:]
    asked = {
        "text": text_name(text),
        "text_sha256": hashlib.sha256(words.encode()).hexdigest(),
        "context": CONTEXT,
        "windows": windows,
        "steps": steps,
    }
    rows = read_results(target, "family") if Path(target).exists() else []
    rows = [row for row in rows if all(row.get(name) == value for name, value in asked.items())]
    tokenizer = byte_tokenizer()
    for family in families:
        if any(row["family"] == family for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ[CACHE] = folder  # what it writes and is calibrated with goes with it
            model = untrained(family)
            start = perplexity(model, tokenizer, held_out, ["full"], CONTEXT, windows)[0].perplexity
            model, began = untrained(family), time.process_time()
            train(model, tokenizer, training, steps)
            subject = {
                "model": family,
                "family": family,
                "parameters": model.num_parameters(),
                "training_cpu_seconds": time.process_time() - began,
                "untrained_perplexity": start,
                "dtype": "float32",
                "device": "cpu",
                **asked,
            }
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            found = measured(folder, held_out, specs, windows)
        rows += stamp(found, **subject)
        write_json(target, rows)
        for row in found:
            ratio = f"{row['ratio']:8.4f}" if "ratio" in row else row["refused"]
            click.echo(f"{family:10} {row['method']:16} {ratio}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and one that ends a text."""
    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def untrained(family: str) -> Any:
    """A model of the family in fp32, with the same weights every time."""
    make, own = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make(**{**COMMON, **own}), dtype=torch.float32).eval()


def train(model: Any, tokenizer: Any, text: str, steps: int) -> None:
    """So many steps, each of a window from anywhere in the text; products in bf16."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        start = int(torch.randint(len(ids) - CONTEXT, (), generator=generator))
        batch = ids[None, start : start + CONTEXT]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            click.echo(f"step {step + 1}: {loss.item():.3f}", err=True)
    model.eval()


def measured(folder: str, text: str, specs: Sequence[str], windows: int) -> list[dict[str, Any]]:
    """A row for each method: its result, or why there is none."""
    model, tokenizer = load_model(folder)
    calibrations = Calibrations()
    refused: dict[str, str] = {}
    for spec in specs:
        method = parse_method(spec)
        try:
            own = [own_calibration(model, tokenizer, m) for m in calibrations.lacking([method])]
            calibrations = Calibrations([*calibrations, *own])
            KVCache(model, method, calibration=calibrations.of(method))
        except ValueError as error:
            refused[method.spec] = str(error)
    served = [m for m in map(parse_method, specs) if m.spec not in refused]
    found = perplexity(model, tokenizer, text, served, CONTEXT, windows, calibrations=calibrations)
    made = {calibration.method: calibration.text for calibration in calibrations}
    rows = [{**row.to_dict(), "calibrations": made} for row in found]
    return rows + [{"method": spec, "refused": why} for spec, why in refused.items()]


if __name__ == "__main__":
    main()
