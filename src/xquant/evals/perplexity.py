"""Teacher-forced perplexity, every key and value read from the packed store.

The text is cut into consecutive windows from its start, each its own sequence in a cache of its own.
A window of ``T`` tokens scores ``T - 1`` next-token predictions. The full cache runs through the same
code on the same windows, so that a ratio compares methods and nothing else.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import KVCache
from ..calibrate.artifact import Calibration
from ..methods import Full, Method
from ..report import Report
from ..spec import parse_method
from .text import cut_windows

SCORED_AT_ONCE = 256
"""Positions whose log-probabilities are held in fp32 at a time."""

Progress = Callable[[int, int, str], None]
"""Called with (windows done, windows in all, spec of the method that runs next or just ran)."""


@dataclass(frozen=True)
class PerplexityRow:
    """One method's result; bytes are those of the last window's cache."""

    method: str
    perplexity: float
    full_perplexity: float
    ratio: float  # perplexity / full_perplexity
    bits_per_value: float
    code_bits: float  # those of the codes alone, the papers' equivalent bit-width
    cache_ratio: float  # resident bytes over the fp16 cache
    cache_bytes: int
    full_cache_bytes: int  # of the fp16 cache
    tokens: int  # predictions scored
    windows: int
    context: int
    seconds: float  # forward passes and scoring
    window_nll: list[float]  # mean of each window, nats per token

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


@dataclass
class _Tally:
    nll: list[float] = field(default_factory=list)
    seconds: float = 0.0
    report: Report | None = None

    @property
    def perplexity(self) -> float:
        mean = math.fsum(self.nll) / len(self.nll)
        return math.exp(mean) if mean < 700 else math.inf


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    methods: Sequence[str | Method],
    context: int = 2048,
    windows: int = 4,
    progress: Progress | None = None,
    calibrations: Sequence[Calibration] = (),
) -> list[PerplexityRow]:
    """Measure ``methods`` on the first ``windows * context`` tokens of ``text``.

    Each of ``calibrations`` goes to the methods it was made for. Returns a row for each different
    method, in the order given.

    Raises:
        ValueError: unknown method, no method, ``context`` or ``windows`` that the model or the text
            does not allow; raised before the first forward pass.
    """
    wanted = list(dict.fromkeys(parse_method(method) for method in methods))
    if not wanted:
        raise ValueError("no method to measure")
    ids = cut_windows(model, tokenizer, text, context, windows)
    return measure(model, ids, wanted, progress, calibrations)


def measure(
    model: Any,
    ids: Tensor,
    methods: Sequence[Method],
    progress: Progress | None = None,
    calibrations: Sequence[Calibration] = (),
) -> list[PerplexityRow]:
    """Measure ``methods`` on windows ``ids [N, T]``; the full cache is measured once, asked or not."""
    baseline = Full()
    tallies = {method: _Tally() for method in (baseline, *methods)}
    made_for = {calibration.method: calibration for calibration in calibrations}
    use = {method: made_for.get(method.calibrated_as) for method in tallies}
    for method in tallies:  # so that bad input is told of before the first forward pass
        KVCache(model, method, attend="store", calibration=use[method])
    total, done = len(ids) * len(tallies), 0
    for window in ids.to(model.device):
        for method, tally in tallies.items():
            if progress is not None:
                progress(done, total, method.spec)
            nll, seconds, tally.report = _score(model, window, method, use[method])
            tally.nll.append(nll)
            tally.seconds += seconds
            done += 1
    if progress is not None:
        progress(done, total, method.spec)
    full = tallies[baseline].perplexity
    return [_row(method.spec, tallies[method], full, ids) for method in methods]


@torch.inference_mode()
def _score(
    model: Any, window: Tensor, method: Method, calibration: Calibration | None
) -> tuple[float, float, Report]:
    """Mean negative log-likelihood (nats) of ``window [T]`` after its first token, and seconds."""
    # Made before the clock starts: the first cache of a method does the method's offline work.
    cache = KVCache(model, method, attend="store", calibration=calibration)
    started = time.perf_counter()
    logits = model(window[None], past_key_values=cache, use_cache=True).logits[0, :-1]
    parts = zip(logits.split(SCORED_AT_ONCE), window[1:].split(SCORED_AT_ONCE), strict=True)
    total = math.fsum(
        F.cross_entropy(part.float(), target, reduction="sum").item() for part, target in parts
    )
    seconds = time.perf_counter() - started
    return total / (len(window) - 1), seconds, cache.report()


def _row(spec: str, tally: _Tally, full: float, ids: Tensor) -> PerplexityRow:
    windows, context = ids.shape
    report = tally.report
    assert report is not None
    return PerplexityRow(
        method=spec,
        perplexity=tally.perplexity,
        full_perplexity=full,
        ratio=tally.perplexity / full,
        bits_per_value=report.bits_per_value,
        code_bits=report.code_bits,
        cache_ratio=report.cache_ratio,
        cache_bytes=report.cache_bytes,
        full_cache_bytes=report.full_cache_bytes,
        tokens=windows * (context - 1),
        windows=windows,
        context=context,
        seconds=tally.seconds,
        window_nll=tally.nll,
    )
