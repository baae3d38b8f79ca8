"""Decode time beside the uncompressed cache: everything interleaved in one run, filled with random states."""

import copy
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .. import __version__, compat
from ..analysis.shapes import SHAPES
from ..attention import attach
from ..cache import KVCache
from ..calibrate.artifact import Calibration, fingerprint
from ..kernels import native
from ..kernels.newest import Newest
from ..methods import Method, Seen
from ..methods.transform import Transform

FILL = 4096
"""Tokens that are filled in at a time."""
SHAPE_LAYERS = 8
"""Layers of a shape that are timed one after the other, so that none finds its codes in a CPU cache."""
READ_BYTES = 512 << 20
HOPELESS = 2.0
FULL_SETTINGS = tuple(
    (dtype, attention)
    for dtype in (torch.float32, torch.bfloat16)
    for attention in ("sdpa", "eager")
)


def shaped_model(name: str) -> Any:
    """A few attention layers of a known model's shape, with random weights and next to nothing else.

    Raises:
        ValueError: no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"no shape '{name}': one of {', '.join(SHAPES)}")
    rest = {"intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": SHAPE_LAYERS}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPES[name], **rest})).eval()


def random_calibration(model: Any, method: Transform) -> Calibration:
    """A calibration of random numbers, for a model without a tokenizer.

    No channel is worth more than another, so all have codes: the slowest that a budget can be.
    """
    views = attach(model).view.compressed
    tensors = method.shapes(views)
    for name, found in tensors.items():
        if found.is_meta:
            tensors[name] = torch.randn(found.shape) * found.shape[-1] ** -0.5
    made_for = method.calibrated_as, fingerprint(views)
    return Calibration(tensors, *made_for, text="random numbers", version=__version__)


class Contender(ABC):
    """A cache of ``context`` tokens of a model, that decodes."""

    name: str
    model: Any
    dtype: torch.dtype
    setting: str
    cache: Any
    alone: bool = True
    """Whether its attention can be timed by itself."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Resident bytes of the whole cache."""

    @abstractmethod
    def attend(self) -> None:
        """The attention of one token in every layer, and nothing else."""

    def step(self) -> None:
        """Decode one token."""
        ids = torch.zeros(self.batch, 1, dtype=torch.long, device=self.model.device)
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """A query, and the key and value of its token."""
        config = compat.text_config(self.model)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        return tuple(  # type: ignore[return-value]
            torch.randn(self.batch, h, 1, size, dtype=self.dtype, device=self.model.device)
            for h in heads
        )

    @property
    def batch(self) -> int:
        return self._batch

    _batch: int


class Compressed(Contender):
    """A method's cache."""

    def __init__(
        self, model: Any, method: Method, context: int, batch: int, calibration: Any, kernel: str
    ) -> None:
        self.name, self.model, self._batch = method.spec, model, batch
        self.cache = KVCache(model, method, calibration=calibration, kernel=kernel)
        self.dtype = self.cache.compressed[0].codec.view.dtype
        fill(self.cache, context, batch)
        self._newest = self.newest()

    @property
    def setting(self) -> str:  # type: ignore[override]
        return self.cache.report().kernel

    @property
    def cache_bytes(self) -> int:
        return self.cache.report().cache_bytes

    def attend(self) -> None:
        query, key, value = self._newest
        scaling = query.shape[-1] ** -0.5
        newest = Newest(query, key, value, None, scaling, None)
        for layer in self.cache.compressed:
            index = layer.codec.view.index
            layer.carry_up()
            if self.cache.attend(index, newest) is None:
                keys, values, mask = self.cache.answer(index, key, value, None)
                own = compat.attention_function("sdpa", layer.codec.view.module)
                own(layer.codec.view.module, query, keys, values, mask, scaling=scaling)
        self.cache.finish()


class Full(Contender):
    """transformers' own uncompressed cache, with one of its attention implementations."""

    name = "full"

    def __init__(self, model: Any, attention: str, context: int, batch: int) -> None:
        self.model, self._batch, self.setting = model, batch, attention
        self.dtype = next(model.parameters()).dtype
        self.cache = DynamicCache(config=model.config)
        _, key, _ = self._newest = self.newest()
        shape = (batch, key.shape[1], context, key.shape[3])
        for i in range(len(self.cache.layers)):
            states = (torch.randn(shape, dtype=self.dtype, device=model.device) for _ in range(2))
            self.cache.update(*states, i)
        config = compat.text_config(model)
        config._attn_implementation = attention

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def attend(self) -> None:
        query = self._newest[0]
        for module in _attentions(self.model):
            layer = self.cache.layers[module.layer_idx]
            own = compat.attention_function(self.setting, module)
            own(module, query, layer.keys, layer.values, None, scaling=query.shape[-1] ** -0.5)


class Grouped(Full):
    """The best form of attention in plain torch that is known: bf16, batched over key/value heads, the
    query heads of each together. Not one of transformers' settings."""

    name = "torch-grouped"

    def attend(self) -> None:
        query = self._newest[0]
        for layer in self.cache.layers:
            batch, heads, tokens, size = layer.keys.shape
            keys, values = (t.view(batch * heads, tokens, size) for t in (layer.keys, layer.values))
            queries = query.view(batch * heads, -1, size)
            scores = torch.bmm(queries, keys.mT).float() * size**-0.5
            torch.bmm(scores.softmax(-1).to(self.dtype), values)


def fill(cache: KVCache, context: int, batch: int) -> None:
    """Give an empty cache ``context`` tokens with random states, without running the model."""
    for start in range(0, context, FILL):
        length = min(FILL, context - start)
        device = cache.compressed[0].codec.view.device
        positions = torch.arange(start, start + length, device=device).expand(batch, -1)
        cache.index.append(positions, torch.ones_like(positions, dtype=torch.bool))
        for layer in cache.compressed:
            view = layer.codec.view
            x = torch.randn(batch, length, view.hidden, dtype=view.dtype, device=view.device)
            key = torch.randn(
                batch, view.kv_heads, length, view.head_size, dtype=view.dtype, device=view.device
            )
            raw = key.transpose(1, 2).flatten(2)
            layer.append(Seen(x, x, raw, key, torch.randn_like(key)))
        for layer in cache.compressed:
            layer.release()


def _attentions(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]


def _copy(model: Any, dtype: torch.dtype) -> Any:
    """The model in ``dtype``, with a configuration of its own; weights are shared where they can be."""
    tensors = [*model.parameters(), *model.buffers()]
    memo = {id(t): t for t in tensors} if model.dtype == dtype else {}
    return copy.deepcopy(model, memo).to(dtype)


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory; the best of a few runs."""
    block = torch.ones(READ_BYTES // 4)
    read = native.reader()
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        if read is None:
            block.sum()
        else:
            read(block)
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


@dataclass
class Settings:
    """What is measured, and how often."""

    context: int
    batch: int = 1
    rounds: int = 15
    warm_up: int = 3
    kernel: str = "auto"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


@torch.inference_mode()
def bench(
    model: Any,
    methods: Sequence[Method],
    settings: Settings,
    whole: bool,
    progress: Callable[[int, int, str], None],
    calibrations: Sequence[Calibration] = (),
    peers: Sequence[Callable[[Settings], Contender]] = (),
) -> list[dict[str, Any]]:
    """A row for the full cache (the best of transformers' settings) and for every method.

    Args:
        model: in any dtype; every contender gets a copy that shares its weights, or is in another dtype.
        whole: decode whole tokens too, rather than the attention alone.
        peers: makers of further contenders.
    """
    made = {found.method: found for found in calibrations}
    contenders: list[Contender] = []
    copies = {dtype: _copy(model, dtype) for dtype in settings.dtypes}
    for dtype, attention in FULL_SETTINGS:
        if dtype in copies:
            own = _copy(copies[dtype], dtype)
            contenders.append(Full(own, attention, settings.context, settings.batch))
            if not whole and dtype == torch.bfloat16 and attention == "sdpa":
                grouped = Grouped(own, attention, settings.context, settings.batch)
                contenders.append(grouped)
    for method in methods:
        for dtype in settings.dtypes if whole else settings.dtypes[:1]:
            calibration = made.get(method.calibrated_as)
            contenders.append(
                Compressed(
                    copies[dtype],
                    method,
                    settings.context,
                    settings.batch,
                    calibration,
                    settings.kernel,
                )
            )
    contenders += [make(settings) for make in peers]
    steps, alone, slow = _measure(contenders, settings, whole, progress)
    layers = len(_attentions(model))
    bandwidth = read_bandwidth() if model.device.type == "cpu" else None
    decisive = steps if whole else alone
    medians = [statistics.median(times) for times in decisive]
    best: dict[str, int] = {}
    for i, contender in enumerate(contenders):
        if i not in slow and medians[i] < medians[best.setdefault(contender.name, i)]:
            best[contender.name] = i
    full = decisive[best["full"]]
    rows = []
    for name, i in best.items():
        contender = contenders[i]
        per_layer = statistics.median(alone[i]) / layers if contender.alone else None
        ratios = sorted(a / b for a, b in zip(full, decisive[i], strict=True))
        size = contender.cache_bytes
        rate = size / layers / per_layer if per_layer else None
        rows.append(
            {
                "method": name,
                "context": settings.context,
                "batch": settings.batch,
                "dtype": str(contender.dtype).removeprefix("torch."),
                "kernel": contender.setting,
                "ms_per_token": medians[i] * 1e3,
                "ms_min_max": [min(decisive[i]) * 1e3, max(decisive[i]) * 1e3],
                "measured": "decode" if whole else f"attention of {layers} layers",
                "attention_ms_per_layer": per_layer and per_layer * 1e3,
                "cache_bytes": size,
                "speedup_vs_full": statistics.median(ratios),
                "speedup_min_max": [ratios[0], ratios[-1]],
                "gbytes_per_second": rate and rate / 1e9,
                "read_gbytes_per_second": bandwidth and bandwidth / 1e9,
                "share_of_read_bandwidth": rate / bandwidth if rate and bandwidth else None,
                "rounds": settings.rounds,
                "tried": {
                    f"{str(c.dtype).removeprefix('torch.')} {c.setting}": medians[j] * 1e3
                    for j, c in enumerate(contenders)
                    if c.name == name
                },
            }
        )
    return rows


def _measure(
    contenders: Sequence[Contender],
    settings: Settings,
    whole: bool,
    progress: Callable[[int, int, str], None],
) -> tuple[list[list[float]], list[list[float]], set[int]]:
    """Seconds of decoding a token and of its attention alone, by contender and round, and which contenders
    were given up: after the warm-up, settings that took `HOPELESS` times as long as another of their name.
    They would cost most of the time, and have the times of the warm-up.

    In its turn each works twice, and the second time counts: when decoding, the step before was one of
    the same cache, not of one that moved gigabytes.
    """
    steps: list[list[float]] = [[] for _ in contenders]
    attention: list[list[float]] = [[] for _ in contenders]
    decisive = steps if whole else attention
    total = settings.warm_up + settings.rounds
    slow: set[int] = set()
    for number in range(total):
        if number == settings.warm_up:
            slow = _hopeless(contenders, decisive)
        for i, contender in enumerate(contenders):
            progress(number * len(contenders) + i, total * len(contenders), contender.name)
            if i in slow:
                continue
            if number == settings.warm_up:
                steps[i].clear()
                attention[i].clear()
            for job, times in ((contender.step, steps[i]), (contender.attend, attention[i])):
                if job == contender.step and not whole:
                    continue
                job()
                _synchronize(contender)
                start = time.perf_counter()
                job()
                _synchronize(contender)
                times.append(time.perf_counter() - start)
    return steps, attention, slow


def _hopeless(contenders: Sequence[Contender], times: Sequence[Sequence[float]]) -> set[int]:
    found = [min(taken, default=0.0) for taken in times]
    best: dict[str, float] = {}
    for contender, taken in zip(contenders, found, strict=True):
        best[contender.name] = min(taken, best.get(contender.name, taken))
    return {i for i, c in enumerate(contenders) if found[i] > HOPELESS * best[c.name]}


def _synchronize(contender: Contender) -> None:
    if contender.model is not None and contender.model.device.type == "cuda":
        torch.cuda.synchronize()
