"""`calibrate`: from a model, a method and some text to an artifact."""

import hashlib
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .. import __version__, calibration_store, compat
from ..calibration import Calibration, check
from ..codecs import fingerprint
from ..methods import Method
from ..models.weights import home
from ..progress import Progress, silent
from ..runs import Runs, identity
from ..seam.hooks import attach
from ..spec import parse_method
from ..text import cut_windows
from .collect import collect
from .find import find_calibrator
from .writing import GENERATED, write_samples

TRIED = (16, 8)
"""Texts and tokens of each that are read to see how fast a model is."""
PASSES = 4
"""Times that calibrating takes what such a pass over its tokens does: they are written, read once
more with gradients, and statistics are made of them."""
NAMED = 200
"""Characters of a text's name that an artifact keeps."""


def calibrate(
    model: Any,
    tokenizer: Any,
    method: str | Method,
    text: str | None = None,
    context: int | None = None,
    windows: int | None = None,
    name: str = "text",
    seed: int = 0,
    progress: Progress | None = None,
    runs: Runs | None = None,
) -> Calibration:
    """Gather a method's statistics from the first ``windows * context`` tokens of a text.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's.
        method: a method, or its spec string.
        text: without one the model writes it (`writing`), sampled with ``seed``.
        context: tokens of a sample; by default that of the method's ``calibration_size``.
        windows: samples; likewise.
        name: the text's name in the artifact.
        seed: of the text that the model writes.
        progress: called as ``progress(done, total, what)``.
        runs: keeps the texts that the model has written, and has those of a run that was stopped. Without it
            they are kept in the package's own folder until all are written.

    Raises:
        ValueError: unknown method, or one that needs no calibration; a text that is too short; a model
            that cannot be served.

    Examples:
        >>> from xquant import KVCache, calibrate
        >>> text = tokenizer.decode(prompt.input_ids[0])
        >>> found = calibrate(model, tokenizer, "kvquant-3bit-1%", text, context=64, windows=4)
        >>> found.method
        'kvquant-3bit-1%'
        >>> cache = KVCache(model, "kvquant-3bit-1%", calibration=found)
    """
    method, views = parse_method(method), attach(model).view.compressed
    with torch.no_grad():
        find_calibrator(method, views)  # raises for bad input before the long work
    by_default = method.calibration_size
    context = by_default[0] if context is None else context
    windows = by_default[1] if windows is None else windows
    if text is None:
        name = f"{GENERATED} (seed {seed})"
        samples = _written(model, tokenizer, (context, windows), seed, progress, runs)
    else:
        samples = cut_windows(model, tokenizer, text, context, windows)
    return calibrate_on(model, samples, method, name, progress)


def calibrate_on(
    model: Any,
    samples: Tensor,
    method: str | Method,
    name: str = "tokens",
    progress: Progress | None = None,
) -> Calibration:
    """`calibrate` on token ids ``[N, T]``, each row a sequence of its own."""
    return calibrate_together(model, samples, [parse_method(method)], name, progress)[0]


@torch.inference_mode(False)  # a caller may be in it; a backward pass cannot use its tensors
def calibrate_together(
    model: Any,
    samples: Tensor,
    methods: Sequence[Method],
    name: str = "tokens",
    progress: Progress | None = None,
) -> list[Calibration]:
    """`calibrate_on` for several methods, with as many passes over the samples as the longest needs."""
    views = attach(model).view.compressed
    calibrators = [find_calibrator(method, views) for method in methods]
    samples, tell = samples.clone(), progress or silent
    passes = zip_longest(*(each.stages(*samples.shape) for each in calibrators))
    for number, stages in enumerate(passes, 1):
        done = 0

        def step(what: str = f"pass {number}") -> None:
            nonlocal done
            done += 1
            tell(done, len(samples), what)

        pairs = zip(calibrators, stages, strict=True)
        given = [(each.codecs, stage) for each, stage in pairs if stage is not None]
        collect(model, samples, given, step)
    digest = hashlib.sha256(samples.to("cpu", torch.int64).numpy().tobytes()).hexdigest()
    made = []
    for method, calibrator in zip(methods, calibrators, strict=True):
        tensors = calibrator.tensors()
        check(tensors, method.expected(views), "give another text")
        made.append(
            Calibration(
                tensors=tensors,
                method=method.calibrated_as,
                model=fingerprint(views),
                text=f"{name[:NAMED]}, sha256 {digest[:16]}, {samples.numel()} tokens",
                version=__version__,
            )
        )
    return made


def own_calibration(
    model: Any, tokenizer: Any, method: str | Method, progress: Progress | None = None
) -> Calibration:
    """The calibration of a method that calibrates itself, from a text that the model writes. Both are kept
    on disk and found there the next time; `KVCache` finds the calibration by itself.

    Raises:
        ValueError: unknown method, or one that needs no calibration; a model that cannot be served.
        OSError: the folder cannot be written to.

    Examples:
        >>> from xquant import KVCache, own_calibration
        >>> found = own_calibration(model, tokenizer, "tc-2bit")
        >>> cache = KVCache(model, "tc-2bit")
        >>> smaller = KVCache(model, "tc-1.5bit")  # one calibration serves any number of bits
    """
    method = parse_method(method)
    found = kept_calibration(model, method)
    if found is None:
        own, size = fingerprint(attach(model).view.compressed), method.calibration_size
        ids = calibration_store.find_text(size, own, compat.text_config(model).vocab_size)
        if ids is None:
            ids = _written(model, tokenizer, size, 0, progress, None)
            calibration_store.keep_text(ids, own)
        found = calibrate_on(model, ids, method, f"{GENERATED} (seed 0)", progress)
        calibration_store.keep(found)
    return found


def kept_calibration(model: Any, method: Method) -> Calibration | None:
    """What `own_calibration` has kept of this model; None where it has not yet made it.

    Raises:
        ValueError: as `own_calibration`.
    """
    views = attach(model).view.compressed
    with torch.no_grad():
        find_calibrator(method, views)  # raises for bad input before the long work
    return calibration_store.find(method.calibrated_as, fingerprint(views), method.expected(views))


def expected_seconds(model: Any, tokens: int) -> float:
    """About how long `own_calibration` takes with so many tokens, by the time of one pass over `TRIED`."""
    ids = torch.zeros(TRIED, dtype=torch.int64, device=home(model))
    with torch.inference_mode():
        taken = []
        for _ in range(3):  # the first pass of a model takes longer than others
            started = time.perf_counter()
            model(ids)
            taken.append(time.perf_counter() - started)
    return min(taken) * tokens / ids.numel() * PASSES


def _written(
    model: Any,
    tokenizer: Any,
    size: tuple[int, int],
    seed: int,
    progress: Progress | None,
    runs: Runs | None,
) -> Tensor:
    """The samples of ``size`` (their tokens and their number) that the model writes. Without ``runs``, a run
    that was stopped goes on from what it had finished all the same, and nothing of it is left in the end."""
    if runs is not None:
        return write_samples(model, tokenizer, *size, seed, progress, runs)
    subject = {"size": size, "seed": seed, "identity": identity(model, "", [])}
    unfinished = Runs(calibration_store.unfinished(), subject)
    samples = write_samples(model, tokenizer, *size, seed, progress, unfinished)
    unfinished.forget()
    return samples
