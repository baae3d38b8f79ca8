"""`calibrate`: from a model, a method and some text to an artifact."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .. import __version__, calibration_store, compat
from ..calibration import Calibration, check
from ..codecs import fingerprint
from ..methods import Method
from ..progress import Progress, silent
from ..runs import Runs
from ..seam.hooks import attach
from ..spec import parse_method
from ..text import cut_windows
from .collect import collect
from .find import find_calibrator
from .writing import GENERATED, write_samples

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
        runs: keeps the texts that the model has written, and has those of a run that was stopped.

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
        samples = write_samples(model, tokenizer, context, windows, seed, progress, runs)
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
    method, views = parse_method(method), attach(model).view.compressed
    with torch.no_grad():
        find_calibrator(method, views)  # raises for bad input before the long work
    own = fingerprint(views)
    found = calibration_store.find(method.calibrated_as, own, method.expected(views))
    if found is None:
        words = compat.text_config(model).vocab_size
        ids = calibration_store.find_text(method.calibration_size, own, words)
        if ids is None:
            ids = write_samples(model, tokenizer, *method.calibration_size, progress=progress)
            calibration_store.keep_text(ids, own)
        found = calibrate_on(model, ids, method, f"{GENERATED} (seed 0)", progress)
        calibration_store.keep(found)
    return found
