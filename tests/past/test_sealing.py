"""When blocks are sealed: at the end of a decode step, as a prefill goes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.caches import make_cache
from support.models import prompt, tiny
from xquant import KVCache


@torch.inference_mode()
def run(model: Any, cache: KVCache, start: int, stop: int) -> Tensor:
    """Tokens ``start`` to ``stop`` of a text in one forward pass."""
    logits: Tensor = model(prompt(2, 100)[:, start:stop], past_key_values=cache).logits
    return logits


def sealed(cache: KVCache) -> list[int]:
    return [layer.stream.tokens for layer in cache.compressed]


@pytest.mark.parametrize("kernel", ["auto", "folded", "reference"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_decode_step_reads_the_block_that_it_completes_exactly(kernel: str, count: int) -> None:
    """As a cache does whose tail keeps the block from being complete."""
    model = tiny("llama", head_dim=32, hidden_size=128)
    cache, later = (KVCache(model, spec, kernel=kernel) for spec in ("int2:group=32", "int2:group=32,tail=3"))
    for one in (cache, later):
        run(model, one, 0, 50)
        run(model, one, 50, 63)
    got, want = (run(model, one, 63, 63 + count) for one in (cache, later))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert sealed(cache) == [64] * 5 and sealed(later) == [32] * 5
    got, want = (run(model, one, 63 + count, 64 + count) for one in (cache, later))
    assert not torch.allclose(got, want, rtol=1e-2, atol=1e-2)


def test_a_prefill_seals_as_it_goes() -> None:
    model = tiny("llama")
    cache, held = KVCache(model, "int2:group=8"), []

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        held.append(sealed(cache))

    handles = [layer.register_forward_hook(look) for layer in model.model.layers]
    run(model, cache, 0, 17)
    assert held == [[16] * i + [0] * (5 - i) for i in range(1, 6)]
    held.clear()
    run(model, cache, 17, 33)  # a few tokens are no prefill, though they complete two blocks
    assert held == [[16] * 5] * 5
    assert sealed(cache) == [32] * 5
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("spec", ["int2:group=8,sink=2", "crosslayer:group=8,tail=0"])
def test_a_decode_step_that_fails_seals_nothing(spec: str) -> None:
    model = tiny("llama")
    cache, other = make_cache(model, spec), make_cache(model, spec)
    for one in (cache, other):
        run(model, one, 0, 39)

    def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise RuntimeError("no")

    handle = model.model.layers[4].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        run(model, cache, 39, 40)
    handle.remove()
    assert sealed(cache) == [32] * 5
    assert {layer.get_seq_length() for layer in cache.compressed} == {39}
    for start in (39, 40):
        assert torch.equal(run(model, cache, start, start + 1), run(model, other, start, start + 1))
