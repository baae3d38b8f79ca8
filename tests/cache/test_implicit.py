"""Calls that pass no cache have a compressed one: the tokens are those that a cache passed by hand gives."""

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, TextIteratorStreamer, pipeline

from support.lm_eval_data import harness_folder, words
from support.models import left_padded, prompt, tiny, what_is_set
from support.word_tokenizer import text_of, word_tokenizer
from xquant import KVCache, compress, compressed, decompress, detach
from xquant.compat import CACHE

SPEC = "kivi-2bit:group=8"


def generated(model: Any, **options: Any) -> torch.Tensor:
    inputs = options.pop("inputs", {"input_ids": prompt(1, 30)})
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    found: torch.Tensor = model.generate(**inputs, **options)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inputs": left_padded([30, 17])},
        {"num_beams": 3},
        {"num_return_sequences": 3, "num_beams": 3, "inputs": left_padded([30, 17])},
        {"prompt_lookup_num_tokens": 3},
        {"assisted": True},
    ],
)
def test_generate_gives_what_a_cache_by_hand_gives(options: dict[str, Any]) -> None:
    model = tiny("llama")
    if options.pop("assisted", False):
        options = {"assistant_model": tiny("llama", num_hidden_layers=2)}
    want = generated(model, past_key_values=KVCache(model, SPEC), **dict(options))
    plain = generated(model, **dict(options))
    with compressed(model, SPEC):
        assert torch.equal(generated(model, **dict(options)), want)
        assert torch.equal(generated(model, **dict(options)), want)  # with a cache of its own
    assert torch.equal(generated(model, **dict(options)), plain)
    assert not torch.equal(want, plain)  # 2 bits are seen


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_cache_goes_by_the_name_that_this_transformers_has() -> None:
    model = tiny("llama")
    want = generated(model, **{CACHE: KVCache(model, SPEC)})
    with compressed(model, SPEC):
        assert torch.equal(generated(model), want)
        assert isinstance(model(prompt(1, 30), use_cache=True)[CACHE], KVCache)


def test_pipelines_and_streams() -> None:
    model, tokenizer = tiny("llama"), word_tokenizer()
    text = text_of(40)
    inputs = tokenizer(text, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    ids = model.generate(**inputs, past_key_values=KVCache(model, SPEC), **options)
    want = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :])
    with compressed(model, SPEC):
        ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert ask(text, return_full_text=False, **options)[0]["generated_text"] == want
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        given = {**inputs, **options, "streamer": streamer}
        # In a copy of the context, a thread is in the block.
        thread = Thread(target=copy_context().run, args=(model.generate,), kwargs=given)
        thread.start()
        assert "".join(streamer) == want
        thread.join()


def test_three_turns_without_a_cache_read_all_anew() -> None:
    model, ids = tiny("llama"), prompt(1, 20)
    by_hand = ids
    with compressed(model, SPEC):
        for turn in range(3):
            answer = generated(model, inputs={"input_ids": ids})
            cache = KVCache(model, SPEC)
            wanted = generated(model, inputs={"input_ids": by_hand}, past_key_values=cache)
            assert torch.equal(answer, wanted)
            ids = by_hand = torch.cat([answer, prompt(1, 5, seed=turn)], 1)


def test_a_forward_pass_that_asks_for_a_cache_has_one() -> None:
    model = tiny("llama")
    with compressed(model, SPEC), torch.no_grad():
        out = model(prompt(1, 20), use_cache=True)
        assert isinstance(out.past_key_values, KVCache)
        again = model(prompt(1, 1), past_key_values=out.past_key_values, use_cache=True)
        assert again.past_key_values is out.past_key_values
        assert not isinstance(model(prompt(1, 20)).past_key_values, KVCache)
        assert model(prompt(1, 20), use_cache=False).past_key_values is None


def test_what_a_caller_asks_for_is_left_alone() -> None:
    model = tiny("llama")
    plain = generated(model)
    with compressed(model, SPEC):
        own = DynamicCache(config=model.config)
        assert torch.equal(generated(model, past_key_values=own), plain)
        assert own.get_seq_length() == 41
        for options in ({"use_cache": False}, {"cache_implementation": "static"}):
            assert torch.equal(generated(model, **options), plain)


def test_blocks_end_as_they_began() -> None:
    model = tiny("llama")
    attributes = set(vars(model))
    hooks = len(model._forward_pre_hooks)

    compress(model, "int8:group=8")
    with pytest.raises(KeyError), compressed(model, SPEC):
        assert kind(model) == SPEC
        raise KeyError
    assert kind(model) == "int8:group=8"
    with pytest.raises(ValueError, match="unknown method"):
        compress(model, "nothing")
    assert kind(model) == "int8:group=8"
    compress(model, SPEC)
    assert kind(model) == SPEC
    decompress(model)
    decompress(model)
    assert kind(model) == "DynamicCache"
    assert set(vars(model)) == attributes
    assert len(model._forward_pre_hooks) == hooks + 1  # that of the caches


def kind(model: Any) -> str:
    """By what a call that passes no cache is compressed."""
    out = generated(model, max_new_tokens=2, return_dict_in_generate=True)
    cache: Any = out["past_key_values"]
    called: Any = model(prompt(1, 20), use_cache=True).past_key_values
    assert type(called) is type(cache)
    return cache.method.spec if isinstance(cache, KVCache) else type(cache).__name__


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` gives in a thread that is started for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


OTHER = "int8:group=8"


def test_a_block_holds_in_the_context_that_opened_it() -> None:
    model, other = tiny("llama"), tiny("llama")
    with compressed(model, SPEC):
        assert in_a_thread(partial(kind, model)) == kind(other) == "DynamicCache"
        assert in_a_thread(partial(copy_context().run, kind, model)) == SPEC
        compress(model, OTHER)
        assert in_a_thread(partial(kind, model)) == OTHER
        assert kind(model) == SPEC
        decompress(model)
        assert kind(model) == SPEC
        with compressed(other, OTHER), compressed(model, OTHER):
            assert kind(model) == kind(other) == OTHER
        assert kind(model) == SPEC
        kept = copy_context()
    assert kept.run(kind, model) == "DynamicCache"


def opened(model: Any, spec: str) -> Iterator[str]:
    """A generator that says in its block by what the model is compressed."""
    with compressed(model, spec):
        while True:
            yield kind(model)


def test_blocks_of_generators_end_in_any_order() -> None:
    model = tiny("llama")
    before = what_is_set(model)
    first, second = opened(model, SPEC), opened(model, OTHER)
    assert (next(first), next(second), next(first)) == (SPEC, OTHER, OTHER)
    first.close()
    assert next(second) == OTHER
    third = opened(model, SPEC)
    assert next(third) == SPEC
    in_a_thread(third.close)
    assert next(second) == OTHER
    second.close()
    assert kind(model) == "DynamicCache"
    detach(model)
    assert what_is_set(model) == before


def test_blocks_of_threads_end_in_any_order() -> None:
    model = tiny("llama")
    before = what_is_set(model)
    turns = [Event() for _ in range(5)]
    found: dict[str, list[str]] = {}

    def block(name: str, spec: str, comes: int, leaves: int) -> None:
        turns[comes].wait(60)
        with compressed(model, spec):
            found[name] = [kind(model)]
            turns[comes + 1].set()
            turns[leaves].wait(60)
            found[name].append(kind(model))
        found[name].append(kind(model))
        turns[leaves + 1].set()

    jobs = [("a", SPEC, 0, 2), ("b", OTHER, 1, 3)]
    threads = [Thread(target=block, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    turns[0].set()
    for thread in threads:
        thread.join()
    plain = "DynamicCache"
    assert found == {"a": [SPEC, SPEC, plain], "b": [OTHER, OTHER, plain]}
    assert kind(model) == plain
    detach(model)
    assert what_is_set(model) == before


def test_blocks_of_tasks_that_overlap() -> None:
    model = tiny("llama")

    async def block(spec: str, rounds: int) -> list[str]:
        found = []
        with compressed(model, spec):
            for _ in range(rounds):
                await asyncio.sleep(0)
                found += [kind(model), await asyncio.to_thread(kind, model)]
        return [*found, kind(model)]

    async def both() -> list[list[str]]:
        return await asyncio.gather(block(SPEC, 1), block(OTHER, 2))

    plain = "DynamicCache"
    assert asyncio.run(both()) == [[SPEC] * 2 + [plain], [OTHER] * 4 + [plain]]
    assert kind(model) == plain


def test_copies_that_are_made_in_a_block_are_not_in_it() -> None:
    model = tiny("llama")
    with compressed(model, SPEC):
        other = copy.deepcopy(model)
        assert kind(other) == "DynamicCache"
        with compressed(other, OTHER):
            assert (kind(other), kind(model)) == (OTHER, SPEC)
    assert "_prepare_cache_for_generation" not in vars(other)


def test_copies_are_compressed_by_themselves() -> None:
    model = tiny("llama")
    want = generated(model, past_key_values=KVCache(model, SPEC))
    compress(model, SPEC)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generated(other), want)
        cache: Any = generated(other, return_dict_in_generate=True)["past_key_values"]
        assert cache.attachment.view.model is other
    decompress(model)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "llama"])
def test_what_does_not_generate_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="a transformers model is needed, not"):
        compress(thing, SPEC)


def test_lm_eval_scores_as_with_a_cache_by_hand(tmp_path: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance")
    model = tiny("llama")
    tokenizer = AutoTokenizer.from_pretrained(harness_folder(tmp_path))
    text = words(0, 20)
    inputs = tokenizer(text, return_tensors="pt")
    cache = KVCache(model, SPEC)
    ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, do_sample=False)
    want = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :])
    scorer = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    options = {"until": ["nothing that is written"], "max_gen_toks": 6, "do_sample": False}
    request = instance.Instance("generate_until", {}, (text, options), 0)
    with compressed(model, SPEC):
        assert scorer.generate_until([request], disable_tqdm=True) == [want]


def test_offloading_without_a_device_is_refused_at_once() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="needs a model on a device"):
        compress(model, SPEC, offload="cpu")
    decompress(model)
