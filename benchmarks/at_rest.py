"""How much a cache at rest loses: a prompt is read exactly, stored, and continued from what was stored.

    python benchmarks/at_rest.py --c4 FILE --json results.json

Each window has 2,048 tokens. The first 1,792 are read in one pass, in which they attend to each other
exactly, and are stored then; 4 sinks and the last 128 tokens stay in full. The last 256 tokens read what
was stored in another pass. Their predictions are compared with the full cache's. The texts are passages
of C4, and Python source (`texts`).
"""

from typing import Any

import click
import torch
from texts import source_versions, texts, with_c4
from torch import Tensor
from torch.nn import functional as F

from xquant import Calibration, KVCache, load_model, own_calibration, parse_method
from xquant.methods import Method
from xquant.results import stamp, write_json
from xquant.runs import Runs, identity
from xquant.text import cut_windows
from xquant_lab.evals.reading import read_together

BUDGETS = "0.5", "1", "2"
SPANS = "", ",span=3", ",span=6", ",span=10"
METHODS = (
    *(f"tc-cl-{bits}bit:tail=128{span}" for bits in BUDGETS for span in SPANS),
    *("tc-2bit:tail=128", "turboquant-4bit:sink=4,tail=128", "oscar-2bit:sink=4,tail=128"),
    *("kivi-2bit:sink=4,tail=128", "kivi-4bit:sink=4,tail=128"),
    *(f"kvtc-{bits}bit{basis}" for bits in BUDGETS for basis in ("", ":basis=joint")),
)
CONTEXT, AFTER = 2048, 256


@click.command()
@with_c4
@click.option("--windows", default=8, show_default=True)
@click.option("--method", "specs", multiple=True, default=METHODS)
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(c4: str, windows: int, specs: tuple[str, ...], resume: str | None, target: str) -> None:
    model, tokenizer = load_model("smollm2")
    methods = [parse_method(spec) for spec in specs]
    made = {
        method: own_calibration(model, tokenizer, method) if method.needs_calibration else None
        for method in methods
    }
    rows: list[dict[str, Any]] = []
    for text, whole in texts(c4).items():
        ids = cut_windows(model, tokenizer, whole, CONTEXT, windows)
        used = [found for found in made.values() if found is not None]
        runs = Runs(resume, {"methods": specs, **identity(model, str(ids.tolist()), used)})
        windowed = []
        for number, window in enumerate(ids):
            held = runs.load(f"window {number}")
            if held is None:
                held = measured(model, window, made)
                runs.save(f"window {number}", held)
            windowed.append(held)
            click.echo(f"{text}: window {number + 1} of {windows}", err=True)
        for number, method in enumerate(methods):
            of = [held[number] for held in windowed]
            row = {name: sum(each[name] for each in of) / len(of) for name in of[0]}
            rows.append({"text": text, "method": method.spec, "windows": windows, **row})
            click.echo("{text:14} {method:32} {bits_per_value:.2f} KL {kl:.5f}".format(**rows[-1]))
    write_json(target, stamp(rows, model="smollm2", dtype="float32", source_of=source_versions()))


@torch.inference_mode()
def measured(model: Any, window: Tensor, methods: dict[Method, Calibration | None]) -> list[dict[str, float]]:
    """What each method loses on one window ``[T]``."""
    prompt, rest = window[None].split([CONTEXT - AFTER, AFTER], 1)
    full = parse_method("full")
    caches = read_together(model, {full: None, **methods}, prompt)
    wanted = predictions(model, caches.pop(full), rest)
    found = []
    for cache in caches.values():
        bits = cache.report().bits_per_value
        own = predictions(model, cache, rest)
        kl = F.kl_div(own, wanted, reduction="batchmean", log_target=True).item()
        same = (own.argmax(-1) == wanted.argmax(-1)).float().mean().item()
        found.append({"kl": max(kl, 0.0), "same_token": same, "bits_per_value": bits})
    return found


def predictions(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    """Log-probabilities ``[t, V]`` of what follows each of more tokens ``[1, t]``."""
    logits: Tensor = model(tokens, past_key_values=cache).logits[0]
    return logits.float().log_softmax(-1)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
