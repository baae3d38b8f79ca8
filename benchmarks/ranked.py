"""Time of one layer's attention on ranked codes, beside the product that it cannot do without.

    python benchmarks/ranked.py --calibration tc.safetensors --json results.json

Everything is interleaved, on one thread, and CPU time is counted. States are random; the spectrum is that of
the calibration's middle layer, drawn out to the channels of the shape.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from xquant import Calibration, KVCache, __version__, attach, parse_method
from xquant.analysis.shapes import shape_config
from xquant.codecs import fingerprint
from xquant.kernels.call import AttentionCall
from xquant.kernels.cpu import library as native
from xquant.quant.steps import steps_of
from xquant.results import stamp, write_json
from xquant_lab.bench.contenders import fill


@click.command()
@click.option("--shape", "shapes", multiple=True, default=["smollm2", "llama-3.1-8b"])
@click.option("--tokens", "contexts", multiple=True, default=[2048, 8192], show_default=True)
@click.option("--method", "spec", default="tc-2bit", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--calibration", "artifact", required=True)
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(
    shapes: tuple[str, ...],
    contexts: tuple[int, ...],
    spec: str,
    rounds: int,
    artifact: str,
    target: str,
) -> None:
    torch.set_num_threads(1)
    found = Calibration.load(artifact)
    layers = {name.split(".")[0] for name in found.tensors}
    spectrum = found.layer(len(layers) // 2)["profile"].float()
    rows = []
    for shape in shapes:
        model = _one_layer(shape)
        calibration = _drawn(model, spec, spectrum)
        for context in contexts:
            for row in _timed(_works(model, spec, calibration, context), rounds):
                rows.append({"shape": shape, "tokens": context, "method": spec, **row})
                click.echo(f"{shape:14} {context:6} {row['what']:24} {row['milliseconds']:8.2f} ms")
    write_json(target, stamp(rows, dtype="float32"))


def _one_layer(shape: str) -> Any:
    rest = {"intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(shape_config(shape, **rest)).eval()


def _drawn(model: Any, spec: str, spectrum: Tensor) -> Calibration:
    """A random basis with this spectrum, for the model's layer."""
    views = attach(model).view.compressed
    width = 2 * views[0].kv_width
    count = min(width, views[0].hidden)
    drawn = torch.nn.functional.interpolate(spectrum.log()[None, None], count, mode="linear")
    profile = drawn.flatten().exp()
    variance = profile[torch.randperm(count)]
    basis = torch.linalg.qr(torch.randn(width, count)).Q
    tensors = {
        "0.mean": torch.zeros(width),
        "0.analysis": (basis * variance.sqrt()).T.half().contiguous(),
        "0.synthesis": (basis / variance.sqrt()).half(),
        "0.usual": steps_of(variance).to(torch.int16),
        "0.profile": profile,
        "0.costs": torch.zeros(width),
    }
    return Calibration(tensors, parse_method(spec).calibrated_as, fingerprint(views), "none", __version__)


def _works(model: Any, spec: str, calibration: Calibration, context: int) -> dict[str, Callable[[], Any]]:
    works: dict[str, Callable[[], Any]] = {}
    for kernel in (*native.isas(), "folded"):
        torch.manual_seed(1)
        cache = KVCache(model, spec, calibration=calibration, kernel=kernel)
        fill(cache, context, 1)
        works[kernel] = _attention(cache)
    codec = cache.compressed[0].codec
    quantizer: Any = codec.segments[0].quantizer
    for count in (sum(quantizer.counts), codec.segments[0].channels):
        weight, states = torch.randn(codec.view.kv_width, count), torch.randn(count, context)
        works[f"product of {count} channels"] = lambda w=weight, x=states: w @ x
    return works


def _attention(cache: KVCache) -> Callable[[], Any]:
    view = cache.compressed[0].codec.view
    query = torch.randn(1, view.query_heads, 1, view.head_size)
    key, value = torch.randn(2, 1, view.kv_heads, 1, view.head_size)
    newest = AttentionCall(query, key, value, None, view.head_size**-0.5, None)
    return lambda: cache.attend(view.index, newest)


def _timed(works: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """In its turn each works until a tenth of a second is over; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            work()
            start, runs = time.process_time(), 0
            while (spent := time.process_time() - start) < 0.1:
                work()
                runs += 1
            times[name].append(1e3 * spent / runs)
    return [
        {"what": name, "milliseconds": statistics.median(ts[1:]), "rounds": rounds}
        for name, ts in times.items()
    ]


if __name__ == "__main__":
    main()
