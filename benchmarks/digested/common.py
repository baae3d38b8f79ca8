"""What all digests are made of: SHA-256 over tensors and files, and texts that a model goes on writing."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

STEPS = 17
WIDE = (
    *("kivi-2bit:group=32,sink=2", "kivi-4bit:group=32,rope=post,tail=5", "kivi-16bit:group=32"),
    *("int8-gs32:group=32,rope=pre", "int3:group=32,keys=channel", "nf4-gs16:group=32,rope=pre"),
    *("asymkv-1.5bit:group=32,tail=0", "crosslayer:group=32,tail=0,km=2,vm=0,kq=4,vq=0"),
    *("kvquant-3bit-1%:group=32", "kvquant-2bit-5%:group=32,per=matrix,sink=2"),
    *("xquant-4bit:group=32,form=gqa", "xquant-3bit:group=32,form=mha,rotate=true,sink=2"),
    *("xquant-cl-3bit:group=32,form=gqa", "xquant-cl-2bit:group=32,form=mha,sink=2"),
    *("tc-2bit:group=32", "tc-cl-1.5bit:group=32,sink=2"),
)
"""Specs for heads of 32."""
Found = dict[str, str]
"""Digests of a case by what they cover; or its refusal, whose message is to stay, too."""
Case = tuple[str, Callable[[], Found]]
"""Its name, and what computes its digests."""


class Digest:
    """SHA-256 over tensors, with their types and shapes, and over files."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._sum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        self._sum.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def add_file(self, file: Path) -> None:
        self._sum.update(f"{file.name} {file.stat().st_size}".encode())
        self._sum.update(file.read_bytes())

    def hex(self) -> str:
        return self._sum.hexdigest()[:16]


@torch.no_grad()
def generated(model: Any, cache: Any, inputs: Mapping[str, Any], steps: int = STEPS) -> str:
    """Of the logits and tokens of a prefill and ``steps`` tokens of greedy decoding."""
    digest, mask = Digest(), inputs["attention_mask"]
    ids = inputs["input_ids"]
    for _ in range(steps):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        digest.add("logits", logits)
        digest.add("tokens", ids)
    return digest.hex()
