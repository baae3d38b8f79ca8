"""Perplexity of methods whose codes come from a layer above, beside others, as generating reads them.

    python benchmarks/sharing.py --text FILE --json results.json

`xquant perplexity` has every token read the store, itself included, which such codes do not allow. Here a
window is fed in chunks: the tokens of a chunk attend to each other exactly and to earlier ones through the
store, for every method alike. Figures of the two do not compare.
"""

import math
from typing import Any

import click
import torch
from torch.nn import functional as F

from xquant import KVCache, load_model, parse_method
from xquant.results import stamp, write_json
from xquant.text import cut_windows, read_text, text_name

# arXiv 2510.11236, tables 5 and 6: 2-bit codes without calibration, values shared from layer 8 on.
TABLES = "kq=30,vq=30,km=30,eta1=0,eta2=0,tail=0"
SPECS = (
    f"crosslayer:{TABLES},vm=30",
    f"crosslayer:{TABLES},vm=8",
    f"crosslayer:{TABLES},vm=8,dominant=1",
    *(f"crosslayer:{TABLES},vm=8,merge={how}" for how in ("floor", "ceil")),
    *(f"crosslayer:{TABLES},vm=8,merge=round,gamma={g}" for g in (0.2, 0.4, 0.6, 0.8)),
    *(f"crosslayer:{TABLES},vm=9,span=3,dominant={k}" for k in range(3)),
    *(f"crosslayer:{TABLES},vm=8,span=4,dominant={k}" for k in range(4)),
)


@click.command()
@click.option("--text", required=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--windows", default=4, show_default=True)
@click.option("--chunk", default=128, show_default=True)
@click.option("--method", "specs", multiple=True, default=SPECS)
@click.option("--json", "target", required=True)
@torch.inference_mode()
def main(text: str, context: int, windows: int, chunk: int, specs: tuple[str, ...], target: str) -> None:
    model, tokenizer = load_model("smollm2")
    cut = cut_windows(model, tokenizer, read_text(text), context, windows)
    rows: list[dict[str, Any]] = []
    for spec in ("full", *specs):
        nll, report = 0.0, None
        for window in cut:
            cache = KVCache(model, spec)
            nll += _score(model, window, cache, chunk)
            report = cache.report()
        assert report is not None
        perplexity = math.exp(nll / (windows * (context - 1)))
        row = {
            "method": parse_method(spec).spec,
            "perplexity": perplexity,
            "ratio": perplexity / rows[0]["perplexity"] if rows else 1.0,
            "code_bits": report.code_bits,
            "bits_per_value": report.bits_per_value,
        }
        rows.append(row)
        click.echo(f"{row['method']:90} {row['ratio']:8.4f} {row['code_bits']:6.3f}")
    subject = {"text": text_name(text), "context": context, "windows": windows, "chunk": chunk}
    write_json(target, stamp(rows, model="smollm2", dtype="float32", **subject))


def _score(model: Any, window: torch.Tensor, cache: KVCache, chunk: int) -> float:
    """Negative log-likelihood, in nats, of ``window [T]`` after its first token."""
    nll = 0.0
    for start in range(0, len(window), chunk):
        part, targets = window[start : start + chunk], window[start + 1 : start + chunk + 1]
        logits = model(part[None], past_key_values=cache, use_cache=True).logits[0]
        nll += F.cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
    return nll


if __name__ == "__main__":
    main()
