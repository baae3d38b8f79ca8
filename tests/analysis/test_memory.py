"""Predicted bytes against those of real caches, to the byte."""

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from support.caches import calibration, make_cache
from support.method_matrix import IDENTITY, LOW, OWN, RIVALS
from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.analysis.memory import CacheBytes, CacheLayout
from xquant.analysis.shapes import Skeleton
from xquant.contents.report import Report
from xquant.quant.quantizer import OUTLIER_NBYTES

SIZES = [(5, 1), (43, 3), (64, 2)]
SIZED = [spec for spec in RIVALS if not parse_method(spec).sized_by_calibration]
OWN_GROUPS = [
    *("full:sink=3", "int4-gs64", "nf4-gs128:group=100", "kivi-2bit:sink=4,tail=30"),
    *("asymkv-1.5bit", "crosslayer", "kvquant-3bit-1%", "kvquant-3bit:scales=online"),
    *(
        "xquant-4bit:rotate=true",
        "xquant-cl-2bit:rotate=true",
        "tc-2bit",
        "tc-cl-1.5bit",
        "tc-2bit:classes=4",
    ),
    *("quarot-2bit:sink=4", "turboquant-3bit:qjl=true", "q4_0", "q8_0:rotate=true", "kvarn-k4v2", "nvfp4"),
    *("kvlinc-2bit:sink=4", "oscar-2bit:sink=4,tail=30", "pairs-3bit", "e8-2bit:sink=4"),
]


@cache
def model_of(family: str) -> tuple[Any, Skeleton]:
    model = tiny(family)
    return model, Skeleton(model.config, torch.float32)


def run(cache: KVCache, model: Any, context: int, batch: int) -> Report:
    cache.reset()
    with torch.inference_mode():
        model(prompt(batch, context), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache.report()


def outlier_nbytes(cache: KVCache) -> int:
    return OUTLIER_NBYTES * sum(layer.stream.outliers for layer in cache.compressed)


def check(held: CacheBytes, report: Report, outliers: int) -> None:
    """Part by part; what depends on the text, as much as this text has."""
    sealed: Counter[str] = Counter()
    for name, size in report.sealed_bytes.items():
        sealed[re.sub("_[0-9]$", "", name)] += size  # of all classes of tokens
    counts = sealed.get("outlier_count", 0)
    assert held.codes == sum(sealed.get(name, 0) for name in ("codes", "values", "signs"))
    ranges = ("scale", "zero", "gain", "second", "length", "class")
    assert held.ranges == sum(sealed.get(name, 0) for name in ranges)
    assert held.tables == report.table_bytes
    assert held.sinks == report.sink_bytes
    assert held.tail == report.tail_bytes
    assert held.index == report.index_bytes
    assert held.skipped == report.skipped_bytes
    assert held.total - held.outliers + counts + outliers == report.cache_bytes
    assert (held.outliers - counts) % OUTLIER_NBYTES == 0
    assert held.outliers >= counts


@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "gemma2"])
@pytest.mark.parametrize("spec", [*IDENTITY, *LOW, *SIZED])
def test_every_part_is_that_of_a_real_run(spec: str, family: str) -> None:
    model, skeleton = model_of(family)
    layout = CacheLayout(skeleton, parse_method(spec))
    # Kernels keep weights of their own, which a plan leaves out.
    cache = make_cache(model, spec, kernel="reference")
    for context, batch in SIZES:
        held, report = layout.count(context, batch), run(cache, model, context, batch)
        check(held, report, outlier_nbytes(cache))
        assert layout.estimated or held.total == cache.nbytes
        assert layout.full_nbytes(context, batch) == report.full_cache_bytes
        assert layout.codec_nbytes == report.codec_bytes
        assert skeleton.nbytes == report.model_bytes


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("spec", OWN_GROUPS)
def test_the_methods_own_groups_in_bfloat16(spec: str, family: str) -> None:
    model = tiny(family)
    calibration(model, spec)  # found in fp32, it fits the same weights in bf16
    model = model.to(torch.bfloat16)
    skeleton = Skeleton(model.config, torch.bfloat16)
    layout = CacheLayout(skeleton, parse_method(spec))
    cache = make_cache(model, spec, kernel="reference")
    for context, batch in [(127, 1), (300, 2)]:
        held, report = layout.count(context, batch), run(cache, model, context, batch)
        check(held, report, outlier_nbytes(cache))
        assert layout.codec_nbytes == report.codec_bytes


def test_every_method_with_blocks_is_among_them() -> None:
    blocks = {*OWN} - {"kvtc"}  # methods/test_kvtc.py
    for specs in ([*IDENTITY, *LOW, *SIZED], OWN_GROUPS):
        assert {parse_method(spec).name for spec in specs} == blocks


@pytest.mark.parametrize("family", ["llama", "llama-mha"])
def test_outliers_found_when_a_block_is_sealed_are_known(family: str) -> None:
    model, skeleton = model_of(family)
    spec = "kvquant-2bit-5%:datatype=nf,scales=online,group=8,sink=2"
    layout, cache = CacheLayout(skeleton, parse_method(spec)), KVCache(model, spec)
    for context, batch in SIZES:
        run(cache, model, context, batch)
        assert layout.estimated
        assert layout.count(context, batch).total == cache.nbytes


@pytest.mark.parametrize("spec", ["kvquant-2bit-5%:group=8", "kvquant-2bit-5%:group=8,per=matrix"])
def test_outliers_beyond_thresholds_are_a_share_of_the_text(spec: str) -> None:
    model, skeleton = model_of("llama")
    cache = make_cache(model, spec)
    with torch.inference_mode():  # the text that the thresholds were found on
        model(prompt(4, 64, seed=11), past_key_values=cache, use_cache=True)
    sealed = cache.report().sealed_bytes
    outliers = sum(size for name, size in sealed.items() if name.startswith("outlier"))
    # In so few tokens it matters on which side of an fp16 threshold the outermost of the others fall.
    predicted = CacheLayout(skeleton, parse_method(spec)).count(64, 4).outliers
    assert predicted == pytest.approx(outliers, rel=0.15)


@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,tail=3", "xquant-cl-2bit:group=8,sink=2", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_peak_is_the_most_held_on_the_way(spec: str, family: str) -> None:
    layout = CacheLayout(model_of(family)[1], parse_method(spec))
    held = [layout.count(context, 2).total for context in range(1, 150)]
    peaks = [layout.peak(context, 2) for context in range(1, 150)]
    assert peaks == [max(held[: i + 1]) for i in range(len(held))]


def test_options_that_the_model_does_not_allow_are_refused() -> None:
    with pytest.raises(ValueError, match="first_layers=9 but only 5 layers"):
        CacheLayout(model_of("llama")[1], parse_method("xquant-cl-2bit:first_layers=9"))
