import pytest
import torch

from support.models import tiny
from xquant import parse_method
from xquant_lab.evals.reading import PASS, passes_of
from xquant_lab.pyramid.cache import cache_of

METHODS = [
    *("kivi-2bit:group=8", "kivi-2bit:group=8,tail=5", "kivi-2bit:group=8,sink=3", "xquant-2bit:group=8"),
    *("kivi-2bit:group=24,sink=4,tail=7", "xquant-cl-2bit:group=8,sink=1", "crosslayer:group=8,tail=9"),
    *("kivi-2bit:group=1", "pyramid:tail=6,group=8"),
]
COUNT = 40


@pytest.fixture(scope="module")
def model():
    return tiny("llama").double()


@pytest.mark.parametrize("start", [3, 30])
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_passes_come_to_the_same_as_tokens_one_by_one(model, method, start):
    method = parse_method(method)
    ids = torch.randint(3, 90, (1, start + COUNT), generator=torch.Generator().manual_seed(4))
    prompt, rest = ids.split([start, COUNT], 1)

    def read(sizes):
        cache = cache_of(model, method)
        model(prompt, past_key_values=cache)
        return torch.cat([model(part, past_key_values=cache).logits for part in rest.split(sizes, 1)], 1)

    sizes = passes_of(method, start, COUNT)
    assert sum(sizes) == COUNT and max(sizes) <= PASS
    assert method.head.startswith("pyramid") or len(sizes) <= 4 * (COUNT // min(method.group, PASS) + 1)
    torch.testing.assert_close(read(sizes), read([1] * COUNT), rtol=1e-3, atol=1e-3)
