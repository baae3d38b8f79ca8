"""A method from outside the package is served, reported, planned for, measured and priced like its own: none
of them knows its classes."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xquant
from support.models import prompt, tiny
from support.outside_method import Ternary
from support.word_tokenizer import text_of, word_tokenizer
from xquant import KVCache, attach, parse_method
from xquant.analysis.gpus import GPUS
from xquant.analysis.memory import CacheLayout
from xquant.analysis.plan import plan
from xquant.analysis.roofline import layout_load
from xquant.analysis.shapes import Skeleton
from xquant.calibrators.run import calibrate_on
from xquant.methods import METHODS, LayerCodec, Method
from xquant.quant import Quantizer
from xquant_lab.bench.contenders import Models
from xquant_lab.bench.roofline import attention_step
from xquant_lab.bench.run import bench
from xquant_lab.bench.shaped import random_calibration
from xquant_lab.bench.trials import Settings
from xquant_lab.evals.perplexity import perplexity

SPECS = ["ternary-1", "ternary-3:sink=2,tail=5", "ternary-5:group=8", "ternary-4:offline=true"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, Ternary.name, Ternary)


def made(model: Any, spec: str) -> tuple[Ternary, KVCache]:
    method = parse_method(spec)
    assert isinstance(method, Ternary)
    calibration = None
    if method.needs_calibration:
        calibration = calibrate_on(model, prompt(2, 40), method)
    return method, KVCache(model, method, calibration=calibration)


@torch.inference_mode()
def decode(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits of the last ``steps`` tokens, one by one after the others."""
    start = ids.shape[1] - steps
    model(ids[:, :start], past_key_values=cache, use_cache=True)
    return torch.cat(
        [
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(start, ids.shape[1])
        ],
        1,
    )


def test_its_spec_is_read_and_written() -> None:
    for spec in SPECS:
        assert parse_method(spec).spec == spec
    with pytest.raises(ValueError, match="digits=6 is above 5"):
        parse_method("ternary-6")


def test_it_decodes_near_the_full_cache_and_nearer_with_more_digits() -> None:
    model, ids = tiny("llama"), prompt(2, 90)
    full = decode(model, KVCache(model, "full"), ids, 20)
    errors = []
    for digits in (1, 3, 5):
        found = decode(model, made(model, f"ternary-{digits}")[1], ids, 20)
        errors.append(float((found - full).norm() / full.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05


@pytest.mark.parametrize("spec", SPECS)
def test_its_cache_is_saved_and_loaded(spec: str, tmp_path: Path) -> None:
    model = tiny("llama")
    method, cache = made(model, spec)
    decode(model, cache, prompt(2, 70), 2)
    cache.save(tmp_path / "c")
    given = None
    if method.needs_calibration:
        given = calibrate_on(model, prompt(2, 40), method)
    other = KVCache.load(model, tmp_path / "c", given)
    ids = prompt(2, 25, seed=3)
    assert torch.equal(decode(model, other, ids, 3), decode(model, cache, ids, 3))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_reported_and_priced_to_the_byte(spec: str, family: str) -> None:
    model = tiny(family)
    method, cache = made(model, spec)
    decode(model, cache, prompt(3, 70), 25)
    report = cache.report()
    layout = CacheLayout(Skeleton(model.config, torch.float32), method)
    held = layout.count(70, 3)
    assert held.total == cache.nbytes == report.cache_bytes
    assert held.codes == report.sealed_bytes["trits"]
    assert held.ranges == report.sealed_bytes.get("reach", 0)
    # A scale of every channel takes as much as a row.
    assert held.tables == report.table_bytes == (layout.row_nbytes if method.offline else 0)
    assert held.outliers == 0 and not layout.estimated
    assert report.bits_per_value > report.code_bits > 0
    row_bytes = -(-method.group * method.digits // 5)
    assert report.code_bits == pytest.approx(8 * row_bytes / method.group)
    assert method.spec in str(report)


def test_a_cache_is_converted_to_it_and_back() -> None:
    model, ids = tiny("llama"), prompt(2, 70)
    cache = KVCache(model, "full")
    decode(model, cache, ids, 1)
    there = cache.converted("ternary-5")
    assert there.report().sealed_bytes.keys() == {"reach", "trits"}
    back = there.converted("full")
    for own, other in zip(cache.compressed, back.compressed, strict=True):
        for exact, read in zip(own.states(), other.states(), strict=True):
            assert (exact - read).norm() < 0.01 * exact.norm()


def test_it_is_planned_for() -> None:
    skeleton = Skeleton(tiny("llama").config, torch.float32)
    methods = [parse_method(spec) for spec in ("full", *SPECS)]
    rows = plan([CacheLayout(skeleton, method) for method in methods], GPUS["l4"], 400, 2, 128)
    full, *ours = rows
    for row, method in zip(ours, methods[1:], strict=True):
        assert row["cache_bytes"] == CacheLayout(skeleton, method).count(400, 2).total
        assert row["cache_bytes"] < full["cache_bytes"] and row["fits"]
        assert row["rematerialization_flops"] is None
    layout = CacheLayout(skeleton, methods[1])
    step, whole = (attention_step(CacheLayout(skeleton, m), 400, 2) for m in (methods[1], methods[0]))
    assert layout_load(layout) is None
    assert step is not None and whole is not None
    assert step.flops == whole.flops and step.nbytes < whole.nbytes


def test_it_is_benchmarked() -> None:
    model, method = tiny("llama"), parse_method("ternary-2:offline=true")
    settings = Settings(40, rounds=1, warm_up=1, dtypes=(torch.float32,), sealing=True)
    models, random = Models(model), random_calibration(model, method)
    methods = [parse_method("ternary-5"), method]
    full, *ours = bench(models, methods, settings, lambda *_: None, [random])
    assert [row["method"] for row in ours] == ["ternary-5", "ternary-2:offline=true"]
    for row in ours:
        assert row["failed"] is None and row["ms_per_token"] > 0
        assert row["kernel"].startswith("reference")
        assert row["cache_bytes"] < full["cache_bytes"]
        assert row["sealing"]["block"] == 16


def test_its_quality_is_measured() -> None:
    model = tiny("llama")
    calibration = calibrate_on(model, prompt(2, 40), "ternary-1:offline=true")
    methods = ["ternary-1:offline=true", "ternary-5"]
    rows = perplexity(model, word_tokenizer(), text_of(80), methods, 40, 2, calibrations=[calibration])
    assert abs(rows[1].difference) < abs(rows[0].difference)
    assert rows[1].bits_per_value > rows[0].bits_per_value


def test_its_random_calibration_is_one() -> None:
    model, method = tiny("llama"), parse_method("ternary-2:offline=true")
    found = random_calibration(model, method)
    assert method.found(attach(model).view.compressed, found)[0]["reach"].max() > 0


def imported(package: str) -> Iterator[tuple[str, Any]]:
    """What the files of a package import by name from the rest of xquant."""
    folder = Path(xquant.__file__).parent / package
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                module = importlib.import_module(f"xquant.{node.module}")
                for name in node.names:
                    if hasattr(module, name.name):
                        yield f"{package}/{file.name}", getattr(module, name.name)


@pytest.mark.parametrize("package", ["analysis", "bench", "cli", "results"])
def test_what_plans_and_measures_imports_no_method_codec_or_quantizer(package: str) -> None:
    for file, thing in imported(package):
        if isinstance(thing, type) and issubclass(thing, (Method, LayerCodec, Quantizer)):
            assert thing is Method, f"{file} imports {thing.__name__}"
