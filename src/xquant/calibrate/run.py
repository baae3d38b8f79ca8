"""`calibrate`: from a model, a method and some text to an artifact."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..attention import attach
from ..evals.text import cut_windows
from ..methods import Method
from ..spec import parse_method
from .artifact import Calibration, fingerprint
from .collect import collect

GENERATED = "generated"
"""Name of the text that a model writes itself."""
GENERATED_AT_ONCE = 8

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs next or just ran)."""


def calibrate(
    model: Any,
    tokenizer: Any,
    method: str | Method,
    text: str | None = None,
    context: int = 2048,
    windows: int = 16,
    name: str = "text",
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Gather a method's statistics from the first ``windows * context`` tokens of a text.

    Without a ``text`` the model writes one, sampled with ``seed`` at temperature 1 from its first
    token on. ``name`` is what the artifact calls the text.

    Raises:
        ValueError: unknown method, or one that needs no calibration; a text that is too short; a model
            that cannot be served.
    """
    method, views = parse_method(method), attach(model).view.compressed
    with torch.no_grad():
        method.calibrator(views)  # so that bad input is told of before the long work
    if text is None:
        name = f"{GENERATED} (seed {seed})"
        samples = generate_samples(model, tokenizer, context, windows, seed, progress)
    else:
        samples = cut_windows(model, tokenizer, text, context, windows)
    return calibrate_on(model, samples, method, name, progress)


@torch.inference_mode(False)  # a caller may be in it; a backward pass cannot use its tensors
def calibrate_on(
    model: Any,
    samples: Tensor,
    method: str | Method,
    name: str = "tokens",
    progress: Progress | None = None,
) -> Calibration:
    """The same from token ids ``[N, T]``, each row a sequence of its own."""
    from .. import __version__

    method, views = parse_method(method), attach(model).view.compressed
    calibrator = method.calibrator(views)
    samples = samples.clone()
    for number, stage in enumerate(calibrator.stages(*samples.shape), 1):
        done = 0

        def step(what: str = f"pass {number}") -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, len(samples), what)

        collect(model, samples, calibrator.codecs, stage, step)
    digest = hashlib.sha256(samples.to("cpu", torch.int64).numpy().tobytes()).hexdigest()
    return Calibration(
        tensors=calibrator.tensors(),
        method=method.calibrated_as,
        model=fingerprint(views),
        text=f"{name}, sha256 {digest[:16]}, {samples.numel()} tokens",
        version=__version__,
    )


@torch.inference_mode()
def generate_samples(
    model: Any,
    tokenizer: Any,
    context: int,
    windows: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """``windows`` texts of ``context`` tokens that the model writes, ``[windows, context]``."""
    positions = getattr(compat.text_config(model), "max_position_embeddings", None)
    if context < 2 or windows < 1 or (positions is not None and context > positions):
        raise ValueError(
            f"{windows} texts of {context} tokens cannot be written: at least 1 of 2 tokens is needed,"
            f" and the model has {positions} positions"
        )
    known = (
        tokenizer.bos_token_id,
        model.generation_config.bos_token_id,
        tokenizer.eos_token_id,
    )
    first = next((token for token in known if isinstance(token, int)), None)
    if first is None:
        raise ValueError("the tokenizer has no first token to write from: give a calibration text")
    texts: list[Tensor] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for start in range(0, windows, GENERATED_AT_ONCE):
            if progress is not None:
                progress(start, windows, "writing a text")
            count = min(GENERATED_AT_ONCE, windows - start)
            texts.append(_sample(model, first, count, context))
    return torch.cat(texts).cpu()


def _sample(model: Any, first: int, count: int, context: int) -> Tensor:
    start = torch.full((count, 1), first, device=model.device)
    ids: Tensor = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=context - 1,
        min_new_tokens=context - 1,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
    )
    return ids
