"""vLLM with and without xquant: how many tokens fit, and how fast prompts are read and answers written.

    .venv-serve/bin/python benchmarks/serving.py --method kivi-4bit --json results.json

Each contender is an engine in a process of its own, with the same memory for its cache; `stock` is vLLM as
it is. All are started, then take the load in turn, round by round, while the others sleep. A load is
`--requests` random prompts at once, without prefix hits. It is run twice in a row: with one new token each,
which is reading the prompts, and with `--new` tokens.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

STOCK = "stock"


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A folder, or smollm2.")
@click.option("--method", "specs", multiple=True, default=["kivi-4bit"], show_default=True)
@click.option("--memory", default=128, show_default=True, help="MiB for the cache.")
@click.option("--context", default=4032, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--requests", default=4, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--json", "target")
@click.option("--one", hidden=True)
def main(specs: tuple[str, ...], target: str | None, one: str | None, **load: Any) -> None:
    if one is not None:
        return _serve(one, load)
    if target is None:
        raise click.UsageError("--json FILE is needed")
    with tempfile.TemporaryDirectory() as folder:
        load["model"] = _folder(load["model"], Path(folder))
        contenders = [_start(spec, load) for spec in (STOCK, *specs)]
        rows: list[dict[str, Any]] = [_ask(each) for each in contenders]  # when they are ready
        timed: list[list[dict[str, float]]] = [[] for _ in rows]
        for _ in range(load["rounds"]):
            for each, times in zip(contenders, timed, strict=True):
                times.append(_ask(each, "run"))
        for each in contenders:
            each.communicate("stop\n")
    for row, times in zip(rows, timed, strict=True):
        row |= {name: statistics.median(t[name] for t in times) for name in times[0]}
        row["rounds"] = times
        click.echo(f"{row['spec']}: {row['tokens']} tokens, {row['decode']:.1f} tokens/s")
    from xquant.results.rows import stamp, write_json

    subject = {name: value for name, value in load.items() if name != "model"}
    write_json(target, stamp(rows, **subject))


def _folder(model: str, to: Path) -> str:
    if model != "smollm2":
        return model
    from xquant import load_model

    found, tokenizer = load_model(model)
    found.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


def _start(spec: str, load: dict[str, Any]) -> "subprocess.Popen[str]":
    options = [f"--{name}={value}" for name, value in load.items()]
    command = [sys.executable, __file__, "--one", spec, *options]
    pipe = subprocess.PIPE
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **quiet}
    )


def _ask(engine: "subprocess.Popen[str]", question: str = "") -> Any:
    """What an engine says next; other lines are its own affair."""
    assert engine.stdin is not None and engine.stdout is not None
    if question:
        engine.stdin.write(question + "\n")
        engine.stdin.flush()
    for line in engine.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise click.ClickException("an engine ended before it had answered")


def _serve(spec: str, load: dict[str, Any]) -> None:
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        load["model"],
        dtype=load["dtype"],
        enforce_eager=True,
        max_model_len=load["context"] + load["new"],
        max_num_seqs=load["requests"],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=load["memory"] << 20,
        additional_config={} if spec == STOCK else {"xquant": spec},
        disable_log_stats=False,
    )
    config = llm.llm_engine.vllm_config
    tokens = config.cache_config.kv_cache_size_tokens
    print(json.dumps({"spec": spec, "tokens": tokens}), flush=True)
    shape = load["requests"], load["context"]
    words = config.model_config.get_vocab_size()
    prompts = torch.randint(words, shape, generator=torch.Generator().manual_seed(0)).tolist()

    def seconds(new: int) -> float:
        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - start

    for line in sys.stdin:
        if line.strip() != "run":
            return
        reading, whole = seconds(1), seconds(load["new"])
        counters = {metric.name: metric for metric in llm.get_metrics()}
        found = {
            "prefill": load["requests"] * load["context"] / reading,
            "decode": load["requests"] * (load["new"] - 1) / max(whole - reading, 1e-9),
            "seconds": whole,
            "preemptions": counters["vllm:num_preemptions"].value,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
