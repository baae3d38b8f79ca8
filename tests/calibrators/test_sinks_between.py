"""The token that begins texts is a row unlike all others. It stands in the middle of a text, too, where
documents are joined."""

import pytest
import torch

from support.caches import rows_held
from support.models import prompt, tiny
from xquant import KVCache, parse_method
from xquant.calibrators.run import calibrate_on

FIRST = 1
"""The token that begins texts."""


@pytest.mark.parametrize(
    "spec",
    [
        "tc-2bit",
        "tc-2bit:basis=keys-first",
        "tc-2bit:metric=identity",
        "tc-2bit:group=32,classes=2",
        "tc-cl-2bit",
        "tc-cl-2bit:span=3,basis=head",
        "tc-cl-2bit:group=32,classes=2",
    ],
)
@torch.no_grad()
def test_it_loses_little_more_than_others_between_two_documents(spec: str) -> None:
    model = tiny("llama")
    embedding = model.model.embed_tokens.weight
    embedding[:, -1] = 0  # Rows of other tokens have nothing of this in the first layer.
    embedding[FIRST] = 0
    embedding[FIRST, -1] = 1
    for part in "k_proj", "v_proj":  # As sinks are, it is louder than others.
        getattr(model.model.layers[0].self_attn, part).weight[:, -1] *= 4
    samples, ids = prompt(8, 192), prompt(1, 129, seed=5)
    samples[:, 0] = ids[:, 0] = ids[:, 60] = FIRST
    method = parse_method(spec)
    cache = KVCache(model, method, calibration=calibrate_on(model, samples, method))
    full = KVCache(model, "full")
    for each in (cache, full):
        model(ids, past_key_values=each)
    held, exact = rows_held(cache)[0][:128], rows_held(full)[0][:128]
    lost = ((held - exact).norm(dim=1) / exact.norm(dim=1))[method.sink :]
    assert lost[60 - method.sink] < 2.2 * lost.median()
