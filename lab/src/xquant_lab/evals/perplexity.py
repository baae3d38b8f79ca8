"""Teacher-forced perplexity, with every key and value read from the packed store.

Of some methods it is known only later what they store of a token: they take codes from a layer above, or drop
tokens. Where one of those is measured, all are read a block at a time: tokens of a block attend to each
other exactly, and to earlier blocks through the store.

The text is cut into consecutive windows from its start, each its own sequence in a cache of its own.
A window of ``T`` tokens scores ``T - 1`` next-token predictions. The full cache runs through the same
code on the same windows, so that a ratio compares methods and nothing else, and each method's
predictions are compared with the full cache's, token by token.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xquant.calibration import Calibration
from xquant.calibrations import Calibrations
from xquant.contents.options import ATTEND
from xquant.methods import Full, Method
from xquant.models.weights import home
from xquant.seam.hooks import attach
from xquant.spec import parse_method
from xquant.text import cut_windows

from ..pyramid.cache import AnyCache, cache_of
from .journal import Journal
from .reading import logits_of

Calibrate = Callable[[Sequence[Method]], Iterable[Calibration]]
"""Makes the calibrations of methods."""
SCORED_AT_ONCE = 256
"""Positions whose log-probabilities are computed at a time, in fp32."""


@dataclass(frozen=True)
class PerplexityRow:
    """One method's result; bytes are those of the last window's cache.

    Standard errors are over windows (None for one window), in nats a token: of the mean negative
    log-likelihood, of its difference to the full cache's, paired by window, and of the divergence.
    """

    method: str
    perplexity: float
    full_perplexity: float
    ratio: float  # perplexity / full_perplexity
    standard_error: float | None
    difference: float  # mean nll minus the full cache's, nats per token: log(ratio)
    difference_error: float | None
    kl: float  # mean KL divergence of the prediction from the full cache's, nats
    kl_error: float | None
    agreement: float  # share of positions whose most likely token is the full cache's
    bits_per_value: float
    code_bits: float  # those of the codes alone, the papers' equivalent bit-width
    cache_ratio: float  # resident bytes over the fp16 cache
    cache_bytes: int
    full_cache_bytes: int  # of the fp16 cache
    tokens: int  # predictions scored
    windows: int
    context: int
    block: int | None  # tokens read at a time; None where every token reads the store
    seconds: float  # of the forward passes
    window_nll: list[float]  # mean of each window, nats per token

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Scored:
    """One method on one window; means over its predictions."""

    nll: float
    kl: float
    agreement: float
    seconds: float
    bits_per_value: float
    code_bits: float
    cache_ratio: float
    cache_bytes: int
    full_cache_bytes: int


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    methods: Sequence[str | Method],
    context: int = 2048,
    windows: int = 4,
    calibrations: Iterable[Calibration] = (),
    journal: Journal | None = None,
) -> list[PerplexityRow]:
    """Measure ``methods`` on the first ``windows * context`` tokens of ``text``.

    Args:
        calibrations: each goes to the methods that it was made for.
        journal: keeps each window that a method has read, and reports them.

    Returns:
        a row for each different method, in the order given.

    Raises:
        ValueError: unknown method, no method, ``context`` or ``windows`` that the model or the text
            does not allow; raised before the first forward pass.
    """
    wanted = list(dict.fromkeys(parse_method(method) for method in methods))
    if not wanted:
        raise ValueError("no method to measure")
    ids = cut_windows(model, tokenizer, text, context, windows)
    return measure(model, ids, wanted, calibrations, journal)


def measure(
    model: Any,
    ids: Tensor,
    methods: Sequence[Method],
    calibrations: Iterable[Calibration] = (),
    journal: Journal | None = None,
    calibrate: Calibrate | None = None,
    attend: str = "store",
) -> list[PerplexityRow]:
    """`perplexity` on windows ``ids`` ``[N, T]``. The full cache is measured in any case.

    Args:
        calibrate: makes the calibrations that are missing, when all other methods are measured. It is given
            the methods that want one.
        attend: ``chunk`` reads a block of tokens at a time in any case. Tokens then see their own block
            exactly, as in generating.

    Raises:
        ValueError: as `perplexity`, and another ``attend``.
    """
    if attend not in ATTEND:
        raise ValueError(f"attend={attend!r} is not one of {', '.join(ATTEND)}")
    baseline, journal = Full(), journal or Journal()
    scored: dict[Method, list[_Scored]] = {method: [] for method in (baseline, *methods)}
    made = Calibrations(calibrations)
    missing = {each.calibrated_as for each in made.lacking(scored)} if calibrate else set()
    late = [method for method in scored if method.calibrated_as in missing]
    through_store = attend == "store" and all(method.causal for method in scored)
    groups = [one.group for one in methods if one != baseline] or [baseline.group]
    block = None if through_store else max(groups)
    # Bad input is refused before the first forward pass.
    for method in late:
        method.expected(attach(model).view.compressed)
    early = [method for method in scored if method not in late]
    for method in early:
        _empty(model, method, made.of(method), block)
    total, done = len(ids) * len(scored), 0
    for group in filter(None, (early, late)):
        if group is late and calibrate:
            made = Calibrations([*made, *calibrate(late)])
        for number, window in enumerate(ids.to(home(model))):
            full = None  # logits, computed where a method has not finished this window
            for method in group:
                journal.tell(done, total, method.spec)
                calibration = made.of(method)
                name = f"{method.spec} window {number}" + (f" by {block}" if block else "")
                name += f" by calibration {calibration.digest}" if calibration else ""
                held = journal.runs.load(name)
                if held is None:
                    if full is None:
                        full, whole = _forward(model, window, baseline, None, block)
                    logits, part = full, whole
                    if method != baseline:
                        logits, part = _forward(model, window, method, calibration, block)
                    part |= _score(logits, full, window)
                    held = [part]
                    journal.runs.save(name, held)
                scored[method].append(_Scored(**held[0]))
                done += 1
    journal.tell(done, total, method.spec)
    return [_row(method.spec, scored[method], scored[baseline], ids, block) for method in methods]


def _empty(model: Any, method: Method, calibration: Calibration | None, block: int | None) -> AnyCache:
    attend = "store" if block is None else "chunk"
    return cache_of(model, method, calibration, attend)


@torch.inference_mode()
def _forward(
    model: Any,
    window: Tensor,
    method: Method,
    calibration: Calibration | None,
    block: int | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Logits ``[T - 1, V]`` of ``window [T]``, and what the pass took."""
    # Made before the clock starts, since the first cache of a method does its offline work.
    cache = _empty(model, method, calibration, block)
    started = time.perf_counter()
    logits = logits_of(model, cache, window[None], block)[0, :-1]
    seconds, report = time.perf_counter() - started, cache.report()
    sizes = ("bits_per_value", "code_bits", "cache_ratio", "cache_bytes", "full_cache_bytes")
    return logits, {"seconds": seconds, **{size: getattr(report, size) for size in sizes}}


@torch.inference_mode()
def _score(logits: Tensor, full: Tensor, window: Tensor) -> dict[str, float]:
    """How well ``logits [T - 1, V]`` predict ``window [T]``, and how close they are to those of the full
    cache: means over positions."""
    nll, kl, agreeing = [], [], 0
    slices = (t.split(SCORED_AT_ONCE) for t in (logits, full, window[1:]))
    for part, reference, target in zip(*slices, strict=True):
        found = part.float().log_softmax(-1)
        nll.append(F.nll_loss(found, target, reduction="sum").item())
        agreeing += int((part.argmax(-1) == reference.argmax(-1)).sum())
        wanted = reference.float().log_softmax(-1)
        kl.append(F.kl_div(found, wanted, reduction="sum", log_target=True).item())
    count = len(window) - 1
    # Rounding can leave a divergence of next to nothing below zero.
    divergence = max(math.fsum(kl) / count, 0.0)
    return {"nll": math.fsum(nll) / count, "kl": divergence, "agreement": agreeing / count}


def _row(
    spec: str,
    scored: Sequence[_Scored],
    full: Sequence[_Scored],
    ids: Tensor,
    block: int | None,
) -> PerplexityRow:
    windows, context = ids.shape
    nll, kl = ([getattr(window, name) for window in scored] for name in ("nll", "kl"))
    differences = [own.nll - other.nll for own, other in zip(scored, full, strict=True)]
    own, whole = _exp_mean(nll), _exp_mean([window.nll for window in full])
    last = scored[-1]
    return PerplexityRow(
        method=spec,
        perplexity=own,
        full_perplexity=whole,
        ratio=own / whole,
        standard_error=_standard_error(nll),
        difference=statistics.fmean(differences),
        difference_error=_standard_error(differences),
        kl=statistics.fmean(kl),
        kl_error=_standard_error(kl),
        agreement=statistics.fmean(window.agreement for window in scored),
        bits_per_value=last.bits_per_value,
        code_bits=last.code_bits,
        cache_ratio=last.cache_ratio,
        cache_bytes=last.cache_bytes,
        full_cache_bytes=last.full_cache_bytes,
        tokens=windows * (context - 1),
        windows=windows,
        context=context,
        block=block,
        seconds=math.fsum(window.seconds for window in scored),
        window_nll=nll,
    )


def _exp_mean(nll: Sequence[float]) -> float:
    mean = statistics.fmean(nll)
    return math.exp(mean) if mean < 700 else math.inf


def _standard_error(values: Sequence[float]) -> float | None:
    return None if len(values) < 2 else statistics.stdev(values) / math.sqrt(len(values))
