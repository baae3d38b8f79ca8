import math
from dataclasses import replace

import pytest
import torch

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant import KVCache, parse_method
from xquant.calibrators.run import calibrate_on
from xquant.runs import Runs
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.perplexity import measure, perplexity
from xquant_lab.pyramid.cache import PyramidCache


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def run(model, methods, tokens=100, context=40, windows=2, **more):
    return perplexity(model, word_tokenizer(), text_of(tokens), methods, context, windows, **more)


def test_the_full_cache_scores_what_the_model_alone_scores(model):
    (row,) = run(model, ["full"])
    ids = torch.tensor(word_tokenizer()(text_of(100), verbose=False)["input_ids"])
    nll = []
    for window in ids[:80].view(2, 40):
        with torch.inference_mode():
            logits = model(window[None]).logits[0]
        nll.append(-logits[:-1].log_softmax(-1).gather(1, window[1:, None]).mean().item())
    assert row.window_nll == pytest.approx(nll, rel=1e-5)
    assert row.perplexity == pytest.approx(math.exp(sum(nll) / 2), rel=1e-5)
    assert (row.ratio, row.tokens, row.windows, row.context) == (1, 78, 2, 40)


def test_fewer_bits_cost_more_and_hold_less(model):
    rows = run(model, ["xquant-8bit:group=8", "kivi-2bit:group=8"], context=48)
    good, poor = rows
    assert [row.method for row in rows] == ["xquant-8bit:group=8", "kivi-2bit:group=8"]
    assert abs(good.ratio - 1) < 0.05 < abs(poor.ratio - 1)
    assert poor.bits_per_value < good.bits_per_value
    assert poor.cache_bytes < good.cache_bytes < good.full_cache_bytes
    assert good.cache_ratio == pytest.approx(good.cache_bytes / good.full_cache_bytes)
    assert good.full_perplexity == poor.full_perplexity


def test_slices_of_positions_score_as_one(model, monkeypatch):
    whole = run(model, ["full"])[0]
    monkeypatch.setattr("xquant_lab.evals.perplexity.SCORED_AT_ONCE", 7)
    assert run(model, ["full"])[0].window_nll == pytest.approx(whole.window_nll, rel=1e-6)


def test_progress_counts_every_forward_pass_and_the_full_cache_runs_once(model):
    seen = []
    rows = run(
        model,
        ["full", "kivi-4bit:group=8", "full", "kivi-4bit:group=8"],
        journal=Journal(tell=lambda *now: seen.append(now)),
    )
    assert [row.method for row in rows] == ["full", "kivi-4bit:group=8"]
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}


def test_the_error_of_the_divergence_is_over_windows(model):
    (both,) = run(model, ["int2:group=8"])
    (first,) = run(model, ["int2:group=8"], windows=1)
    assert first.kl_error is None
    # The first window's divergence is as far from the mean as the second's.
    assert both.kl_error == pytest.approx(abs(first.kl - both.kl))


def test_predictions_are_compared_with_the_full_caches(model):
    full, near, far = run(model, ["full", "int8:group=8", "int2:group=8"])
    assert (full.kl, full.agreement, full.difference) == (0, 1, 0)
    assert 0 < near.kl < far.kl
    assert far.agreement < near.agreement <= 1
    for row in (near, far):
        assert row.difference == pytest.approx(math.log(row.ratio), abs=1e-9)
        parts = [a - b for a, b in zip(row.window_nll, full.window_nll, strict=True)]
        # Of two numbers, the standard error of the mean is half their distance.
        assert row.difference_error == pytest.approx(abs(parts[0] - parts[1]) / 2)
        nll = row.window_nll
        assert row.standard_error == pytest.approx(abs(nll[0] - nll[1]) / 2)


def test_the_divergence_is_that_of_the_two_distributions(model):
    (row,) = run(model, ["int2:group=8"], windows=1)
    assert row.standard_error is None and row.difference_error is None
    ids = torch.tensor(word_tokenizer()(text_of(40), verbose=False)["input_ids"])[None]
    with torch.inference_mode():
        full = model(ids).logits[0, :-1].log_softmax(-1)
        cache = KVCache(model, "int2:group=8", attend="store")
        own = model(ids, past_key_values=cache).logits[0, :-1].log_softmax(-1)
    assert row.kl == pytest.approx((full.exp() * (full - own)).sum(-1).mean().item(), rel=1e-4)
    agreeing = (full.argmax(-1) == own.argmax(-1)).float().mean().item()
    assert row.agreement == pytest.approx(agreeing)


def test_a_stopped_run_goes_on_where_it_was(model, tmp_path):
    runs, methods = Runs(tmp_path, {}), ["kivi-2bit:group=8", "int2:group=8"]

    def stop(done, *_):
        if done == 4:  # in the second window, before the first method
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, methods, journal=Journal(runs, stop))
    assert len(list(tmp_path.rglob("*.json"))) == 4
    whole, rest = run(model, methods), run(model, methods, journal=Journal(runs))
    for one, other in zip(whole, rest, strict=True):
        assert replace(one, seconds=0) == replace(other, seconds=0)
    assert run(model, methods, journal=Journal(runs)) == rest


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tokens": 30}, "holds 30 tokens and one window needs 40"),
        ({"windows": 3}, "holds 2 windows of 40 tokens, not 3"),
        ({"tokens": 60}, "holds 1 window of 40 tokens, not 2"),
        ({"context": 513}, "past the model's 512 positions"),
        ({"context": 1}, "at least 2 tokens"),
        ({"windows": 0}, "at least 1"),
        ({"methods": []}, "no method"),
        ({"methods": ["nonsense"]}, "unknown method"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_pass(model, asked, message):
    def forbidden(*now):
        raise AssertionError("a forward pass was begun")

    with pytest.raises(ValueError, match=message):
        run(model, **{"methods": ["full"], **asked}, journal=Journal(tell=forbidden))


DROPS = "pyramid:keep=0.25,tail=8,group=8"


def test_with_a_method_that_is_not_causal_all_read_a_block_at_a_time(model):
    stored, whole = run(model, ["kivi-2bit:group=16", "full"])
    assert stored.block is whole.block is None
    dropped, blocks, full = run(model, [DROPS, "kivi-2bit:group=16", "full"])
    assert dropped.block == blocks.block == full.block == 16
    assert full.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
    assert blocks.kl < stored.kl  # a block attends to itself exactly
    assert dropped.kl > 0
    assert dropped.cache_bytes < full.cache_bytes


def test_blocks_are_read_through_one_cache(model):
    (row,) = run(model, [DROPS], windows=1)
    ids = torch.tensor(word_tokenizer()(text_of(40), verbose=False)["input_ids"])
    cache = PyramidCache(model, parse_method(DROPS))
    with torch.inference_mode():
        parts = [model(part[None], past_key_values=cache).logits[0] for part in ids.split(8)]
    logits = torch.cat(parts)[:-1]
    nll = -logits.log_softmax(-1).gather(1, ids[1:, None]).mean().item()
    assert row.window_nll == pytest.approx([nll], rel=1e-5)


def test_a_text_can_be_read_as_in_generating(model):
    ids = torch.tensor(word_tokenizer()(text_of(80), verbose=False)["input_ids"]).view(2, 40)
    method = parse_method("kivi-2bit:group=16")
    stored, blocks = (measure(model, ids, [method], attend=attend)[0] for attend in ("store", "chunk"))
    assert stored.block is None and blocks.block == 16
    assert blocks.kl < stored.kl
    with pytest.raises(ValueError, match="attend='later'"):
        measure(model, ids, [method], attend="later")


def test_a_method_that_must_be_calibrated_waits_for_the_others(model):
    ids = torch.tensor(word_tokenizer()(text_of(80), verbose=False)["input_ids"]).view(2, 40)
    waiting, ready = parse_method("tc-2bit:group=16"), parse_method("kivi-2bit:group=16")
    order, made = [], []

    def calibrate(methods):
        order.append("calibrate")
        made.extend(calibrate_on(model, ids, method) for method in methods)
        return made

    journal = Journal(tell=lambda done, total, what: order.append(what))
    rows = measure(model, ids, [waiting, ready], journal=journal, calibrate=calibrate)
    measured = [what.partition("-")[0] for what in order]
    assert measured[:7] == [*("full", "kivi") * 2, "calibrate", "tc", "tc"]
    assert [row.method for row in rows] == [waiting.spec, ready.spec]
    # As where it is there from the start.
    again, _ = measure(model, ids, [waiting, ready], made)
    assert again.window_nll == rows[0].window_nll and again.kl == rows[0].kl
