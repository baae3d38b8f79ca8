"""The weights of a module, of whatever kind: plain ones, quantized ones, and those that accelerate offloads.

accelerate leaves an offloaded weight on the meta device, and brings its numbers in from host memory or from a
file each time that its module runs. Who runs a module needs nothing of this file; who reads a weight does.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..quant.quantizer import as_written

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that hold their own values. torchao's hold codes: they are subclasses."""
REFUSALS = (RuntimeError, AssertionError, TypeError, IndexError)
"""What libraries raise where a quantized layer cannot do what it is asked."""
PRODUCT = 1e-2
"""Relative error of a product that is rounded to 16 bits, and less than that of one whose inputs have 8."""
KEEP_STATES = "use a method that stores keys and values, such as kivi, which does not need the weights"


def is_plain(module: nn.Module) -> bool:
    """Whether the layer is an ordinary ``nn.Linear``: a dense weight, perhaps a bias, and neither an adapter
    nor quantized nor offloaded weights."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(module.weight) in PLAIN
        and module.weight.is_floating_point()
        and offloading(module) is None
    )


def dense(tensor: Tensor) -> Tensor:
    """The numbers of a tensor; of one that holds codes, what they decode to.

    Raises:
        ValueError: they cannot be had; the message names the kind of tensor.
    """
    if type(tensor) in PLAIN:
        return tensor.detach()
    try:
        if tensor.dim() != 2:
            return tensor.dequantize()
        eye = torch.eye(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        return F.linear(eye, tensor).T.contiguous()
    except REFUSALS as error:
        raise ValueError(f"a {type(tensor).__name__} cannot be decoded ({message_of(error)})") from error


def message_of(error: BaseException) -> str:
    """The first line of what an error says; its name, where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def home(module: nn.Module) -> torch.device:
    """The device that a module computes on; the CPU, where it holds no tensor."""
    device = next((t.device for t in held(module)), torch.device("cpu"))
    for each in module.modules() if device.type == "meta" else ():
        hook = offloading(each)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return device


def held(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers of a module, as they are."""
    yield from module.parameters()
    yield from module.buffers()


def numbers(module: nn.Module) -> Iterator[Tensor]:
    """All parameters of a module: offloaded ones as they are kept, quantized ones decoded.

    Raises:
        ValueError: as of `dense`.
    """
    found = {id(t): (each, name, t) for each, name, t in _named(module) if name in each._parameters}
    for part in found.values():
        yield dense(read(*part))


def state(module: nn.Module) -> list[tuple[Any, ...]]:
    """A value to compare with an earlier one. It differs after a weight was replaced, moved, cast, or written
    to in a way that torch counts."""
    found: list[tuple[Any, ...]] = []
    for each, name, tensor in _named(module):
        kept = at_hand(each, name, tensor)
        if isinstance(kept, InFile):
            found.append((name, *kept.state))
        else:
            found.append((id(kept), kept.data_ptr(), kept.dtype, kept.device, version(kept)))
    return found


def version(tensor: Tensor) -> int:
    """How often torch saw a tensor written to."""
    # Inference tensors have no version counter.
    return 0 if tensor.is_inference() else tensor._version


def _named(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for each in module.modules():
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None:
                yield each, name, tensor


# -- weights that accelerate offloads -----------------------------------------------------------------


class InFile:
    """A weight in a file of accelerate's."""

    def __init__(self, files: Any, name: str) -> None:
        self._files, self._name = files, name

    def read(self) -> Tensor:
        """The weight, in memory of its own."""
        found: Tensor = self._files[self._name]
        return found

    @property
    def state(self) -> tuple[Any, ...]:
        """A value that differs once another file is in its place."""
        own = os.path.join(self._files.save_folder or "", f"{self._name}.dat")
        path = self._files.index[self._name].get("safetensors_file") or own
        now = os.stat(path)
        return path, self._name, now.st_ino, now.st_size, now.st_mtime_ns


def offloading(module: nn.Module) -> Any:
    """The hook of accelerate that offloads the weights of ``module``; None where none does."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return next((each for each in hooks if getattr(each, "weights_map", None) is not None), None)


def at_hand(module: nn.Module, name: str, tensor: Tensor) -> Tensor | InFile:
    """The parameter or buffer ``name`` of ``module`` itself, or where it is kept while it is offloaded. One
    that was never loaded is on the meta device here, too."""
    hook = offloading(module)
    if hook is None or (name in module._buffers and not tensor.is_meta):
        return tensor
    kept: Any = hook.weights_map
    while isinstance(getattr(kept, "dataset", None), Mapping):  # the part of a larger map
        kept, name = kept.dataset, kept.prefix + name
    loaded = getattr(kept, "state_dict", kept)
    if name in loaded:
        found: Tensor = loaded[name]
        return found
    return InFile(kept, name) if name in getattr(kept, "index", ()) else tensor


def read(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The same, out of its file where it is in one."""
    found = at_hand(module, name, tensor)
    return found.read() if isinstance(found, InFile) else found


def put_back(module: nn.Module) -> None:
    """Offload again what was brought in for a run that did not come to its end."""
    for each in module.modules():
        hook = offloading(each)
        if hook is not None and not all(p.is_meta for p in each.parameters(recurse=False)):
            hook.post_forward(each, None)


def ask(module: nn.Module, x: Tensor) -> Tensor:
    """What a module gives for ``x``; where it fails, it is left as it was."""
    try:
        out: Tensor = module(x)
    except BaseException:
        put_back(module)
        raise
    return out


# -- linear layers that are not plain -----------------------------------------------------------------


@torch.no_grad()
def decoded_weight(module: nn.Module, probe: Tensor) -> Tensor:
    """The weight ``[out, in]`` of a layer that is not plain, in the dtype and on the device of ``probe``: of
    quantized weights what they decode to, with an adapter their sum.

    Args:
        probe: any input ``[in]``.

    Raises:
        ValueError: it cannot be had; the message names the kind of layer.
    """
    try:
        if isinstance(module, nn.Linear) and module.weight.is_floating_point():
            # torchao: an nn.Linear whose weight is a tensor subclass
            return dense(read(module, "weight", module.weight)).to(probe.device, probe.dtype)
        dequantize = getattr(module, "dequantize", None)
        if callable(dequantize):  # HQQ
            decoded: Tensor = dequantize()
            return decoded.to(probe.dtype)
        # Others can at least be asked: rows of the identity come out as columns of the weight.
        eye = torch.eye(len(probe), dtype=probe.dtype, device=probe.device)
        with as_written(probe):
            bias = bias_of(module, probe)
            return (ask(module, eye) - (0 if bias is None else bias)).T.contiguous()
    except (*REFUSALS, ValueError) as error:
        raise ValueError(
            f"the weights of {type(module).__name__} cannot be decoded ({message_of(error)}): {KEEP_STATES}"
        ) from error


@torch.no_grad()
def check_product(module: nn.Module, weight: Tensor, probe: Tensor) -> None:
    """Refuse a layer that is not plain and does not multiply its input ``probe`` ``[in]`` as it is with its
    ``weight`` ``[out, in]``.

    Raises:
        ValueError: it does not; the message names the kind of layer.
    """
    with as_written(probe):
        bias, found = bias_of(module, probe), ask(module, probe[None])[0].float()
        wanted = F.linear(probe.float(), weight.float(), None if bias is None else bias.float())
    if (found - wanted).norm() > PRODUCT * wanted.norm():
        kind = type(getattr(module, "weight", None)).__name__
        raise ValueError(
            f"{type(module).__name__} does not multiply its input as it is with its weights ({kind}), perhaps"
            f" because it rounds inputs, too: {KEEP_STATES}"
        )


@torch.no_grad()
def bias_of(module: nn.Module, probe: Tensor) -> Tensor | None:
    """The bias ``[out]`` of a linear layer of whatever kind; None where it has none. ``probe``: any input."""
    bias: Tensor | None = getattr(module, "bias", None)
    if bias is None or not bias.is_meta or probe.is_meta:
        return None if bias is None else bias.detach()
    return ask(module, torch.zeros_like(probe)[None])[0]


def sums(tensor: Tensor) -> list[Tensor]:
    """Sums of the bits of a tensor by rows and by columns. They are weighted, so that two rows or columns
    that change places change a sum."""
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous()
    bits = rows.view(torch.uint8)
    bits = F.pad(bits, (0, -bits.shape[1] % 8)).view(torch.int64)
    found = []
    for dim in (0, 1):
        total = bits.sum(dim)
        order = torch.arange(1, 2 * len(total), 2, device=total.device)
        found.append((total * order).sum())
    return found
