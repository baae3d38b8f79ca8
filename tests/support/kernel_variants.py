"""What decode steps start on a GPU that is not there, case by case, as JSON.

PYTHONPATH=tests TRITON_INTERPRET=0 python -m support.kernel_variants
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from support import fake_gpu
from support.caches import calibration
from support.models import left_padded, prompt, tiny
from xquant import KVCache, StaticKVCache

STEPS = 400
LENGTHS = [21, 7, 18]
"""Of prompts, less than a block."""
GROWING = [
    "kivi-4bit:sink=2,tail=8",
    "kivi-4bit:rope=post,sink=2,tail=8",
    "kvquant-3bit-1%:datatype=nf,tail=8",
    "xquant-4bit:sink=2,tail=8",
    "xquant-cl-2bit:first_layers=1,sink=2,tail=8",
]
STATIC = GROWING[:3]
GPU = fake_gpu.install()


def cases() -> Iterator[tuple[str, Any, Any, int, int]]:
    """The name of a case, a model, an empty cache, its sequences, and tokens of a block."""
    models = {layers: model_of(layers) for layers in (1, 3)}
    for batch, block in ((1, 32), (3, 128)):
        for kind, specs in (("growing", GROWING), ("static", STATIC)):
            for spec in specs:
                model, method = models[3 if "cl" in spec else 1], f"{spec},group={block}"
                given = {"calibration": calibration(model, method), "kernel": "triton"}
                if kind == "growing":
                    cache = KVCache(model, method, **given)
                else:
                    cache = StaticKVCache(model, method, LENGTHS[0] + STEPS, **given)
                yield f"{kind} {method} batch {batch}", model, cache, batch, block


def model_of(layers: int) -> Any:
    sizes = {"num_hidden_layers": layers, "head_dim": 32, "hidden_size": 64}
    return tiny("llama", **sizes, max_position_embeddings=1024).bfloat16()


@torch.inference_mode()
def decode(model: Any, cache: Any, batch: int) -> Iterator[int]:
    """Steps behind prompts of unequal length; after each, its number."""
    pads = batch > 1 and isinstance(cache, KVCache)  # the other reads no mask
    given = left_padded(LENGTHS) if pads else {"input_ids": prompt(batch, LENGTHS[0])}
    ids, mask = given["input_ids"], given.get("attention_mask")
    for step in range(1 + STEPS):
        model(ids, attention_mask=mask, past_key_values=cache)
        yield step
        ids = ids[:, -1:]
        mask = None if mask is None else torch.cat([mask, mask.new_ones(batch, 1)], 1)


def seen(model: Any, cache: Any, batch: int, block: int) -> dict[str, Any]:
    """Of each kernel, how often it was started, with how many grids, and how many variants there were at most
    with the same constants; and what was new when the first block had long been sealed."""
    counts: dict[str, int] = defaultdict(int)
    grids: dict[str, set[Any]] = defaultdict(set)
    variants: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    late = set()
    for step in decode(model, cache, batch):
        for one in GPU.started if step else []:  # a prompt is another shape
            known = variants[one.kernel][one.constants]
            if step > block + 16 and one.variant not in known:
                late.add(one.kernel)
            known.add(one.variant)
            grids[one.kernel].add(one.grid)
            counts[one.kernel] += 1
        GPU.started.clear()
    return {
        "started": counts,
        "grids": {kernel: len(each) for kernel, each in grids.items()},
        "variants": {kernel: max(map(len, each.values())) for kernel, each in variants.items()},
        "late": sorted(late),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: seen(*given) for name, *given in cases()}))
