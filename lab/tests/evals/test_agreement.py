import pytest
import torch

from support.lm_eval_data import harness_tokenizer, longbench, words
from support.models import tiny
from xquant import Full, parse_method
from xquant.calibrations import Calibrations
from xquant_lab.evals.agreement import ANSWER, LAST, Agreement, Comparison, mean
from xquant_lab.pyramid.cache import cache_of

METHODS = ["kivi-4bit:group=8", "xquant-4bit:group=8", "kivi-2bit:group=8,tail=16"]
METHODS += ["pyramid:tail=6,group=8", "pyramid:keep=0.3,slope=1,tail=5,group=1,sink=2"]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def prompts(count=2, length=60):
    torch.manual_seed(5)
    return [torch.randint(3, 90, (1, length + i)) for i in range(count)]


def compare(model, methods, asked):
    """The agreement of the full cache and of each method, on each prompt."""
    methods = [parse_method(method) for method in methods]
    comparison = Comparison(model, methods, Calibrations())
    for prompt in asked:
        comparison.answer(Full(), prompt, lambda _, asked=prompt: asked)  # nothing is generated
    return list(comparison.found.values())


def greedy(model, method, prompt):
    """Tokens after ``prompt``, whose last ones read the store; an end of a text ends nothing."""
    cache, tokens = cache_of(model, parse_method(method)), []
    with torch.inference_mode():
        model(prompt[:, :-LAST], past_key_values=cache)
        logits = model(prompt[:, -LAST:], past_key_values=cache).logits
        for _ in range(ANSWER):
            tokens.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits
    return tokens


def test_the_full_cache_agrees_with_itself(model):
    (found,) = compare(model, ["full"], prompts())
    assert found == [Agreement(0.0, ANSWER)] * 2


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_are_those_of_greedy_decoding(model, method):
    asked = prompts(4)
    _, found = compare(model, [method], asked)
    for one, prompt in zip(found, asked, strict=True):
        pairs = zip(greedy(model, "full", prompt), greedy(model, method, prompt), strict=True)
        same = next((i for i, (full, own) in enumerate(pairs) if full != own), ANSWER)
        assert one.same_tokens == same


@pytest.mark.parametrize("method", METHODS)
def test_the_divergence_is_that_of_predictions_that_read_the_store(model, method):
    (prompt,) = prompts(1)
    _, (found,) = compare(model, [method], [prompt])
    with torch.inference_mode():
        full = model(prompt).logits[0, -LAST:].log_softmax(-1)
        cache = cache_of(model, parse_method(method))
        model(prompt[:, :-LAST], past_key_values=cache)
        own = model(prompt[:, -LAST:], past_key_values=cache).logits[0].log_softmax(-1)
    assert found.kl == pytest.approx((full.exp() * (full - own)).sum(-1).mean().item(), rel=1e-4)
    assert found.kl > 0


def test_a_short_prompt_is_compared_too(model):
    first, found = compare(model, ["kivi-2bit:group=8"], prompts(1, LAST - 3))
    assert first == [Agreement(0.0, ANSWER)]
    assert found[0].kl < 1e-9  # nothing was stored before


@pytest.mark.parametrize("prompt", prompts(1) + prompts(1, LAST + 7))
def test_answers_are_those_of_caches_of_their_own(model, prompt):
    methods = [Full(), *map(parse_method, METHODS), parse_method("xquant-cl-2bit:group=8")]
    comparison = Comparison(model, methods, Calibrations())

    def generate(cache):
        return model.generate(prompt, past_key_values=cache, max_new_tokens=9, do_sample=False)

    for method in methods:
        cache = cache_of(model, parse_method(method))
        with torch.inference_mode():
            model(prompt[:, :-LAST], past_key_values=cache)
        assert torch.equal(comparison.answer(method, prompt, generate), generate(cache))


def test_means_are_over_prompts():
    assert mean([Agreement(1.0, 2), Agreement(3.0, 6)]) == Agreement(2.0, 4.0)


@pytest.mark.long
def test_a_task_is_compared_with_the_same_answers(model, tmp_path):
    pytest.importorskip("lm_eval")
    from xquant.runs import Runs
    from xquant_lab.evals.journal import Journal
    from xquant_lab.evals.task_lookup import find_tasks
    from xquant_lab.evals.tasks import Settings, evaluate

    asked = find_tasks(["longbench_hotpotqa"], longbench(tmp_path))
    journal, methods = (
        Journal(Runs(tmp_path / "runs", {})),
        ["kivi-8bit:group=8", "kivi-2bit:group=8"],
    )

    def ask(methods):
        settings = Settings(2, longest=64, compare=True)
        rows = evaluate(model, harness_tokenizer(), methods, asked, settings, journal=journal)
        return {row.method: row for row in rows}

    part = ask(methods[:1])
    whole = ask(methods)  # the answers of the full cache are there again for the second method
    assert part[methods[0]] == whole[methods[0]]
    full, near, far = (whole[method] for method in ["full", *methods])
    assert (full.kl, full.same_tokens) == (0, ANSWER)
    assert 0 < near.kl < far.kl
    assert ANSWER >= near.same_tokens >= far.same_tokens
    alone = evaluate(model, harness_tokenizer(), methods, asked, Settings(2))
    assert all(row.kl is None and row.same_tokens is None for row in alone)


def test_answers_can_be_cut(model):
    pytest.importorskip("lm_eval")
    from xquant_lab.evals.harness import XQuantLM

    lm = XQuantLM(model, tokenizer=harness_tokenizer(), device="cpu")
    (prompt,) = prompts(1)
    whole = lm._model_generate(prompt, 80, [], attention_mask=torch.ones_like(prompt))
    lm.most = 3
    cut = lm._model_generate(prompt, 80, [], attention_mask=torch.ones_like(prompt))
    assert torch.equal(cut, whole[:, :63])


def test_of_a_long_prompt_the_end_is_read(model):
    pytest.importorskip("lm_eval")
    from xquant_lab.evals.harness import XQuantLM

    lm = XQuantLM(model, tokenizer=harness_tokenizer(), device="cpu")
    whole, _ = lm.tok_batch_encode([words(0, 20)])
    lm.longest = 7
    ids, mask = lm.tok_batch_encode([words(0, 20)])
    assert torch.equal(ids, whole[:, -7:]) and mask.shape == (1, 7)
    lm.longest = 99
    assert torch.equal(lm.tok_batch_encode([words(0, 20)])[0], whole)
