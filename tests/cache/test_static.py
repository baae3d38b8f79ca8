"""StaticKVCache: what a KVCache reads, in memory that never moves."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration
from support.models import left_padded, prompt, tiny
from support.unusual_models import built, dynamic_rope
from xquant import KVCache, StaticKVCache
from xquant.kernels.call import AttentionCall
from xquant.seam.masks import PassMask

SPEC, ROOM = "kivi-4bit:group=32", 256


@pytest.fixture(scope="module")
def model() -> Any:
    """With heads that the native kernels read, and weights that make little of small errors."""
    return tiny("llama", head_dim=32, hidden_size=64, initializer_range=0.1)


@torch.no_grad()
def logits(model: Any, cache: Any, ids: Tensor, *ends: int, **inputs: Any) -> Tensor:
    """Of tokens that the cache has not, in passes that end there."""
    found = []
    for end in ends:
        start = cache.get_seq_length()
        found.append(model(ids[:, start:end], past_key_values=cache, **inputs).logits)
    return torch.cat(found, 1)


def close(ours: Tensor, theirs: Tensor, within: float = 1e-3) -> bool:
    return bool((ours - theirs).norm() < within * theirs.norm())


# -- what is read ------------------------------------------------------------------------------------


SPECS = [
    SPEC,
    "kivi-2bit:group=32,tail=32",
    "kivi-3bit:group=32,rope=post,sink=3",
    "kvquant-3bit-1%:group=32,datatype=nf,scales=online",
    "int4:group=32",
    "nf4:group=32",
    "xquant-4bit:group=32",
]
TRELLIS = ["tc-2bit:group=32", "tc-2bit:group=32,basis=keys-first"]
ENDS = 64, 67, *range(68, 100), 112, *range(113, 140)
"""Of passes; whole blocks end within them all."""


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_reads_what_it_reads_in_a_cache_that_grows(model: Any, spec: str) -> None:
    mine, own, ids = StaticKVCache(model, spec, ROOM), KVCache(model, spec), prompt(2, 150)
    # Codes of keys that were turned back may differ by one, and a random model makes more of it.
    assert close(logits(model, mine, ids, *ENDS), logits(model, own, ids, *ENDS), 0.03)
    assert mine.get_seq_length() == own.get_seq_length() == 139


@pytest.mark.parametrize("spec", [*SPECS, *TRELLIS])
def test_pages_are_read_in_place_as_when_they_are_decoded(model: Any, spec: str) -> None:
    made, ids = calibration(model, spec), prompt(2, 150)
    fast, plain = (
        StaticKVCache(model, spec, ROOM, calibration=made, kernel=kernel) for kernel in ("auto", "reference")
    )
    # With heads of 32, `tc` multiplies in 8 bits what is small.
    within = 0.05 if spec in TRELLIS else 0.01
    assert close(logits(model, fast, ids, *ENDS), logits(model, plain, ids, *ENDS), within)
    assert "decodes the whole past" in plain.kernel
    assert "decodes the whole past" not in fast.kernel


def test_generate_gives_the_same_text(model: Any) -> None:
    inputs = left_padded([96, 64, 32])  # blocks begin at the same tokens with padding and without
    asked = {"max_new_tokens": 40, "do_sample": False}
    mine = model.generate(**inputs, past_key_values=StaticKVCache(model, SPEC, ROOM), **asked)
    own = model.generate(**inputs, past_key_values=KVCache(model, SPEC), **asked)
    assert torch.equal(mine, own)


@pytest.mark.parametrize("size", [16, 32])
def test_padding_changes_nothing(size: int) -> None:
    """Each sequence of a batch reads what it reads by itself; with heads that no kernel reads, too."""
    model = tiny("llama", head_dim=size, hidden_size=64)
    lengths = [70, 40, 9]
    batch = left_padded(lengths)
    mask = batch["attention_mask"]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = StaticKVCache(model, SPEC, ROOM)
    more = prompt(3, 40, seed=5)
    with torch.no_grad():
        found = [model(**batch, position_ids=places, past_key_values=cache).logits[:, -1:]]
        for at in range(40):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
            step = {"attention_mask": mask, "position_ids": positions}
            found.append(model(more[:, at : at + 1], past_key_values=cache, **step).logits)
    together = torch.cat(found, 1)
    for number, length in enumerate(lengths):
        alone = StaticKVCache(model, SPEC, ROOM)
        own = torch.cat([batch["input_ids"][number, -length:], more[number]])[None]
        wanted = logits(model, alone, own, length, *range(length + 1, length + 41))
        assert close(together[number], wanted[0, length - 1 :])


def test_a_chunk_of_a_prompt_with_padding(model: Any) -> None:
    """Sequences of which one is padding alone in the first chunk."""
    batch = left_padded([90, 20])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def run(cache: Any, *ends: int) -> Tensor:
        found, start = [], 0
        for end in ends:
            step = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
            found.append(model(ids[:, start:end], past_key_values=cache, **step).logits)
            start = end
        return torch.cat(found, 1)[mask.bool()]

    with torch.no_grad():
        wanted = run(StaticKVCache(model, "full", ROOM), 90)
        found = run(StaticKVCache(model, "full", ROOM), 64, 80, 90)
    assert close(found, wanted)


def test_attentions_are_given_where_they_are_asked_for(model: Any) -> None:
    eager, ids = copy.deepcopy(model), prompt(1, 80)
    eager.set_attn_implementation("eager")
    mine, own = StaticKVCache(eager, SPEC, ROOM), KVCache(eager, SPEC)
    for cache in (mine, own):
        logits(eager, cache, ids, 64)
    found = [
        eager(ids[:, 64:65], past_key_values=cache, output_attentions=True).attentions
        for cache in (mine, own)
    ]
    assert all(close(a, b) for a, b in zip(*found, strict=True))
    assert close(logits(eager, mine, ids, 70), logits(eager, own, ids, 70))


# -- the memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, "kivi-2bit:group=32,tail=32,sink=3"])
def test_nothing_moves(model: Any, spec: str) -> None:
    cache, ids = StaticKVCache(model, spec, ROOM), prompt(2, ROOM)
    assert cache.nbytes == 0
    logits(model, cache, ids, 20)

    def addresses() -> list[int]:
        of_step = cache._sequences
        told = (of_step.first, of_step.table, of_step.limits, of_step.held, of_step.new)
        layers = [address for layer in cache.layers for address in layer.addresses]
        return [*layers, *(t.data_ptr() for t in told)]

    logits(model, cache, ids, 21)
    before, nbytes = addresses(), cache.nbytes
    assert nbytes > 0
    for end in (*range(22, 100), 200, *range(201, ROOM + 1)):
        logits(model, cache, ids, end)
        assert addresses() == before and cache.nbytes == nbytes
    cache.reset()
    assert cache.get_seq_length() == 0
    logits(model, cache, ids, 20, 21)
    assert addresses() == before


def test_what_does_not_fit_is_refused(model: Any) -> None:
    cache, ids = StaticKVCache(model, SPEC, 40), prompt(1, 60)
    with pytest.raises(ValueError, match=r"41 new tokens do not fit: .* room for 40, and holds 0"):
        logits(model, cache, ids, 41)
    logits(model, cache, ids, 39, 40)
    with pytest.raises(ValueError, match=r"1 new tokens do not fit: .* room for 40, and holds 40"):
        logits(model, cache, ids, 41)
    assert cache.get_seq_length() == 40


def test_a_batch_of_another_size_comes_after_reset(model: Any) -> None:
    cache = StaticKVCache(model, SPEC, ROOM)
    logits(model, cache, prompt(2, 50), 40, 41)
    with pytest.raises(ValueError, match="holds a batch of 2, the input has 1"):
        logits(model, cache, prompt(1, 50), 42)
    cache.reset()
    ids = prompt(1, 100, seed=3)
    fresh = logits(model, StaticKVCache(model, SPEC, ROOM), ids, 64, *range(65, 100))
    assert torch.equal(logits(model, cache, ids, 64, *range(65, 100)), fresh)


# -- failures and changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("until", [64, 80, 81, 100, 180])
def test_a_pass_that_fails_leaves_no_trace(model: Any, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer, or in what follows the decoder; a step, several tokens, or a chunk longer than a ring."""
    spec, ids = "kivi-4bit:group=32,sink=2", prompt(1, 250)
    cache, never = (StaticKVCache(model, spec, ROOM) for _ in range(2))
    for each in (cache, never):
        logits(model, each, ids, 50, *range(51, 64))

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("no")

    for module in (model.model.layers[3].mlp, model.lm_head):
        with monkeypatch.context() as patched:
            patched.setattr(module, "forward", failing)
            with pytest.raises(KeyError):
                logits(model, cache, ids.flip(1), until)
        assert cache.get_seq_length() == 63
    ends = 64, *range(65, 110)
    assert torch.equal(logits(model, cache, ids, *ends), logits(model, never, ids, *ends))


def test_a_call_of_another_form_that_fails_leaves_no_trace(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer repeats a call that was answered, with other pointers: not one that failed after it."""
    cache, random = StaticKVCache(model, SPEC, room=ROOM), torch.Generator().manual_seed(0)
    logits(model, cache, prompt(1, 100), 100)
    cache.begin(1, 1, PassMask())
    layer, view = cache.layers[0], cache.layers[0].codec.view
    if layer._paged is None:
        pytest.skip("no kernel reads pages")
    heads = view.query_heads, view.kv_heads, view.kv_heads
    wide = [torch.randn(1, count, 1, 2 * view.head_size, generator=random) for count in heads]
    found = []
    for fails in (False, False, True, False):
        states = [t[..., : view.head_size] for t in wide]
        call = AttentionCall(*(states if fails else [t.contiguous() for t in states]), None, 1.0, None)
        out = call.new_out()
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr(layer._paged._kernel, "_run", _refuse)
                with pytest.raises(MemoryError):
                    layer.attend_newest(call, cache._sequences, out)
            else:
                layer.attend_newest(call, cache._sequences, out)
                found.append(out)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def _refuse() -> None:
    raise MemoryError


def test_what_is_not_finite_is_refused(model: Any) -> None:
    other, ids = copy.deepcopy(model), prompt(1, 100)
    cache = StaticKVCache(other, SPEC, ROOM)
    logits(other, cache, ids, 40)
    weight = other.model.layers[2].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(torch.nan)
        for end in (41, 90):
            with pytest.raises(ValueError, match="NaN or infinity in the hidden states"):
                logits(other, cache, ids, end)
        weight.copy_(kept)
    assert cache.get_seq_length() == 40
    wanted = logits(other, StaticKVCache(other, SPEC, ROOM), ids, 40, 41)[:, -1:]
    assert torch.equal(logits(other, cache, ids, 41), wanted)


@pytest.mark.parametrize("spec", [SPEC, "kivi-2bit:group=32,tail=32,sink=2"])
def test_the_newest_tokens_can_be_dropped(model: Any, spec: str) -> None:
    ids, other = prompt(1, 200), prompt(1, 200, seed=4)
    cache, never = (StaticKVCache(model, spec, ROOM) for _ in range(2))
    for each in (cache, never):
        logits(model, each, ids, 60)
    mixed = torch.cat([ids[:, :60], other[:, 60:]], 1)
    for start in range(60, 100, 5):  # some drop the end of a block that was sealed
        ends = range(start + 1, start + 6)
        logits(model, cache, ids, *range(start + 1, start + 17))
        cache.crop(-16)
        assert cache.get_seq_length() == start
        assert torch.equal(logits(model, cache, mixed, *ends), logits(model, never, mixed, *ends))
    cache.crop(98)
    assert cache.get_seq_length() == 98
    with pytest.raises(ValueError, match="back 16 tokens at most, here from the 111 that it"):
        cache.crop(28)
    assert cache.get_seq_length() == 98
    cache.crop(-98)
    assert cache.get_seq_length() == 0


def test_a_pass_that_failed_does_not_forbid_to_drop_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, ends = prompt(1, 250), (45, *range(46, 70))
    cache, never = (StaticKVCache(model, SPEC, ROOM) for _ in range(2))
    for each in (cache, never):
        logits(model, each, ids, 60)
    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, cache, ids, 240)
    for each in (cache, never):
        each.crop(-16)
    assert torch.equal(logits(model, cache, ids, *ends), logits(model, never, ids, *ends))


def test_inference_mode_may_begin_and_end(model: Any) -> None:
    cache, ids = StaticKVCache(model, "kivi-4bit:group=32,sink=2", ROOM), prompt(1, 120)
    found = []
    for at in range(20, 100, 4):
        start = cache.get_seq_length()
        with torch.inference_mode(at % 8 == 0):
            found.append(logits(model, cache, ids[:, :at], *range(start + 1, at + 1)))
    want = logits(model, StaticKVCache(model, cache.method, ROOM), ids, *range(1, 97))
    assert close(torch.cat([each.clone() for each in found], 1), want)


def test_it_is_not_pickled(model: Any) -> None:
    with pytest.raises(TypeError, match="is not saved: use KVCache"):
        pickle.dumps(StaticKVCache(model, SPEC, ROOM))


def test_assisted_generation(model: Any) -> None:
    ids = prompt(1, 50)
    asked = {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": 5}
    own = model.generate(ids, past_key_values=KVCache(model, SPEC), **asked)
    cache = StaticKVCache(model, SPEC, ROOM)
    assert torch.equal(model.generate(ids, past_key_values=cache, **asked), own)


def test_a_copy_is_a_cache_of_its_own(model: Any) -> None:
    spec = "kivi-4bit:group=32,sink=2"
    cache, ids = StaticKVCache(model, spec, ROOM), prompt(2, 200)
    logits(model, cache, ids, 70)
    with torch.inference_mode():
        other = copy.deepcopy(cache)
    assert not {a for layer in cache.layers for a in layer.addresses} & {
        a for layer in other.layers for a in layer.addresses
    }
    ends = range(71, 130)
    logits(model, cache, ids.flip(1), *ends)
    wanted = logits(model, StaticKVCache(model, spec, ROOM), ids, 70, *ends)[:, 70:]
    assert torch.equal(logits(model, other, ids, *ends), wanted)


def test_beams_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="stay as they are: use KVCache"):
        model.generate(
            prompt(1, 20),
            past_key_values=StaticKVCache(model, SPEC, ROOM),
            num_beams=2,
            max_new_tokens=3,
        )


# -- what is served ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, spec, why",
    [
        ("gemma3", SPEC, "layer 0 has .*sliding"),
        ("gpt2", SPEC, "no rotary embedding"),
        ("deepseek_v3", "kivi-4bit:group=32,rope=post", "latents"),
        ("llama-mha", "xquant-4bit:group=32", "layer inputs"),
        ("llama", "tc-cl-2bit:group=32", "predicted from those below"),
        ("llama", "kivi-4bit:group=8", "a multiple of 32 tokens, not 8"),
    ],
)
def test_what_has_no_static_cache(family: str, spec: str, why: str) -> None:
    other = tiny(family)
    made = calibration(other, spec)
    with pytest.raises(ValueError, match=f"has no static cache: .*{why}.*; use KVCache"):
        StaticKVCache(other, spec, ROOM, calibration=made)


def test_sinks_that_are_learned() -> None:
    other = tiny("gpt_oss", layer_types=["full_attention"] * 4, num_hidden_layers=4)
    with pytest.raises(ValueError, match="sinks that are learned; use KVCache"):
        StaticKVCache(other, SPEC, ROOM)


def test_frequencies_that_change_with_the_length() -> None:
    other = dynamic_rope()
    with pytest.raises(ValueError, match="other frequencies for long inputs; use KVCache"):
        StaticKVCache(other, SPEC, ROOM)
    StaticKVCache(other, "kivi-4bit:group=32,rope=post", ROOM)


@pytest.mark.parametrize("name", ["Qwen3", "Glm4", "Olmo2", "Granite", "GPTNeoX"])
def test_families(name: str) -> None:
    """Keys that are normed, neighbours that turn, a part of a head, another scale of scores."""
    other = built(name, head_dim=32, hidden_size=128)
    ids, ends = prompt(2, 110), (64, *range(65, 110))
    mine, own = StaticKVCache(other, SPEC, ROOM), KVCache(other, SPEC)
    assert close(logits(other, mine, ids, *ends), logits(other, own, ids, *ends), 0.03)


def test_room_is_needed(model: Any) -> None:
    with pytest.raises(ValueError, match="room for 0 tokens"):
        StaticKVCache(model, SPEC, 0)
