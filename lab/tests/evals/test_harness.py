import pytest
import torch
from transformers import AutoModelForCausalLM

from support.lm_eval_data import harness_folder, harness_tokenizer, words
from support.models import tiny
from xquant import KVCache, parse_method

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from xquant_lab.evals.harness import XQuantLM
from xquant_lab.pyramid.cache import cache_of

STORED = "kivi-2bit:group=8"
SHARED = "crosslayer:group=8,span=3,dominant=1,km=0,vm=0,kq=0,vq=0,tail=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(harness_folder(tmp_path_factory.mktemp("model")))


def ours(method="full", batch_size=1, family="llama"):
    return XQuantLM(tiny(family), method, tokenizer=harness_tokenizer(), batch_size=batch_size, device="cpu")


def requests(kind):
    texts = [(words(i, 5 + 9 * i), " " + words(i + 5, 2 + i)) for i in range(5)]
    until = {"until": ["w7"], "max_gen_toks": 12, "do_sample": False}
    arguments = {
        "loglikelihood": texts,
        "loglikelihood_rolling": [(context,) for context, _ in texts],
        "generate_until": [(context, until) for context, _ in texts],
    }
    return [Instance(kind, {}, each, 0) for each in arguments[kind]]


def ask(lm, kind):
    return getattr(lm, kind)(requests(kind), disable_tqdm=True)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_the_full_cache_equals_the_stock_model_type_to_the_bit(folder, kind, batch_size):
    same = {"pretrained": folder, "device": "cpu", "batch_size": batch_size}
    stock, full = HFLM(**same), XQuantLM(**same, method="full")
    assert ask(full, kind) == ask(stock, kind)


def through(model, method, step=99, **more):
    """A function of ids that gives logits, read ``step`` tokens at a time through a cache."""

    def logits_of(ids):
        cache = cache_of(model, parse_method(method), **more)
        with torch.inference_mode():
            parts = [model(part, past_key_values=cache).logits for part in ids.split(step, 1)]
        return torch.cat(parts, 1)

    return logits_of


def likelihoods(logits_of):
    """What log-likelihood requests should give, each text alone."""
    tokenizer, sums = harness_tokenizer(), []
    for request in requests("loglikelihood"):
        context, continuation = (tokenizer(text)["input_ids"] for text in request.args)
        ids = torch.tensor([context + continuation])
        found = logits_of(ids[:, :-1])[0, -len(continuation) :].log_softmax(-1)
        sums.append(found[range(len(continuation)), continuation].sum().item())
    return pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_likelihoods_read_the_store_and_padding_sets_no_range(batch_size):
    lm = ours(STORED, batch_size)
    found = [likelihood for likelihood, _ in ask(lm, "loglikelihood")]
    assert found == likelihoods(through(lm.model, STORED, attend="store"))
    assert found != likelihoods(through(lm.model, "full"))


@pytest.mark.parametrize("method", [SHARED, "pyramid:keep=0.25,tail=8,group=8"])
def test_what_is_not_causal_is_read_a_block_at_a_time(method):
    lm = ours(method, 3)
    found = [likelihood for likelihood, _ in ask(lm, "loglikelihood")]
    assert found == likelihoods(through(lm.model, method, step=8))
    assert found != likelihoods(through(lm.model, "full"))


def test_generation_uses_the_compressed_cache_with_padding_on_the_left():
    lm = ours(STORED, 3)
    prompts = [request.args[0] for request in requests("generate_until")][:3]
    ids, mask = lm.tok_batch_encode(prompts)
    assert mask[0, 0] == 0
    out = lm._model_generate(ids, ids.shape[1] + 12, [], attention_mask=mask)
    cache = KVCache(lm.model, STORED)
    own = lm.model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False
    )
    full = lm.model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(out, own)
    assert not torch.equal(out, full)


def test_the_packaged_models_come_by_name(monkeypatch):
    asked = []

    def load(*arguments):
        asked.append(arguments)
        return tiny("llama"), harness_tokenizer()

    monkeypatch.setattr("xquant_lab.evals.harness.load_model", load)
    XQuantLM("smollm2-mha", "kivi-2bit", dtype="bfloat16", device="cpu")
    XQuantLM("smollm2", device="cpu")
    assert asked == [
        ("smollm2-mha", torch.bfloat16, "cpu"),
        ("smollm2", torch.float32, "cpu"),
    ]


@pytest.mark.parametrize(
    ("method", "message"), [("nonsense", "unknown method"), ("kvquant-3bit-1%", "xquant calibrate")]
)
def test_what_cannot_be_served_is_refused_before_the_first_request(method, message):
    with pytest.raises(ValueError, match=message):
        ours(method)


def test_a_bad_method_is_refused_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail())
    with pytest.raises(ValueError, match="unknown method"):
        XQuantLM("some/model", "nonsense")
