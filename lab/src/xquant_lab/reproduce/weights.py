"""Quantized weights after SqueezeLLM (arXiv 2306.07629), for measuring a compressed cache on a model whose
weights are compressed too.

Every output channel of a linear layer has ``2**bits`` levels of its own, by k-means weighted with the
diagonal of the Fisher information. The most sensitive weights of a matrix and the largest stay in fp16
beside the codes, and the levels do not see them. The weights come back as a dense matrix, for quality is
what is measured; `weight_bits` counts what codes, levels and the sparse part would take.

Differs from the paper: k-means starts once, from a fixed seed.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xquant.calibrators.collect import frozen, mean_loss
from xquant.models import find_decoder, layers_of
from xquant.models.weights import PLAIN, home
from xquant.quant.affine import FP16_MAX

SENSITIVE = 0.0005
"""The share of a matrix that is kept because a change of it changes the loss most."""
OUTLIERS = 0.004
"""The share that is kept for its magnitude, of what is left."""


def linear_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the linear layers in the model's decoder layers, by their names in the model: neither
    embeddings nor the output layer.

    Raises:
        ValueError: there are none, or none that can be quantized.
    """
    decoder = find_decoder(model)
    layers = () if decoder is None else layers_of(decoder)
    modules = (module for layer in layers for module in layer.modules())
    inside = {id(module.weight) for module in modules if isinstance(module, nn.Linear)}
    found = {name: weight for name, weight in model.named_parameters() if id(weight) in inside}
    dense = (w.is_floating_point() and type(w) in PLAIN and not w.is_meta for w in found.values())
    if not found or not all(dense):
        raise ValueError(
            f"the weights of {type(model).__name__} cannot be quantized: its decoder layers have no linear"
            " layers in floating point, or they are offloaded"
        )
    return found


@torch.inference_mode(False)  # a caller may be in it; a backward pass cannot use its tensors
def collect_weights(
    model: Any, samples: Tensor, weights: Mapping[str, Tensor], done: Callable[[], None]
) -> dict[str, Tensor]:
    """The mean square of the gradient of every element of ``weights``, parameters of the model, over samples
    ``[N, T]`` (token ids), fp32: the diagonal of the empirical Fisher information. ``done`` is called after
    each sample."""
    found = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    with frozen(model, but=weights.values()), torch.enable_grad():
        for sample in samples.clone().to(home(model)):
            logits = model(sample[None], use_cache=False).logits[0, :-1]
            loss = mean_loss(logits, sample)
            # An expert that no token went to has no gradient.
            gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            for total, gradient in zip(found.values(), gradients, strict=True):
                total += gradient.float().square() / len(samples)
            del logits, loss, gradients
            done()
    return found


def quantize_weights(
    weights: Mapping[str, Tensor],
    fisher: Mapping[str, Tensor],
    bits: int,
    done: Callable[[], None],
) -> dict[str, Tensor]:
    """Each of the matrices ``[N, C]`` as its codes give it back, in fp16 on the CPU.

    Args:
        fisher: of the same names and shapes, how much the loss depends on every element.
        done: called after each matrix.
    """
    found = {}
    for name, weight in weights.items():
        found[name] = quantize_matrix(weight.detach().cpu().float(), fisher[name].cpu(), bits)
        done()
    return found


def quantize_matrix(weight: Tensor, fisher: Tensor, bits: int) -> Tensor:
    """One matrix ``[N, C]``, fp32 on the CPU, as its codes give it back: fp16."""
    from sklearn import config_context

    sparse = sparse_part(weight, fisher)
    with config_context(assume_finite=True, skip_parameter_validation=True):
        channels = zip(weight.numpy(), fisher.numpy(), ~sparse.numpy(), strict=True)
        levels = [channel_levels(row[dense], share[dense], bits) for row, share, dense in channels]
    table = torch.from_numpy(np.stack(levels)).float().clamp(-FP16_MAX, FP16_MAX).half()
    wide = table.float()
    codes = torch.searchsorted((wide[:, 1:] + wide[:, :-1]) / 2, weight)
    return torch.where(sparse, weight.clamp(-FP16_MAX, FP16_MAX).half(), table.gather(1, codes))


def sparse_part(weight: Tensor, fisher: Tensor) -> Tensor:
    """Which elements of a matrix stay as they are: the most sensitive, then the largest of the others."""
    kept = torch.zeros(weight.numel(), dtype=torch.bool, device="cpu")
    kept[fisher.flatten().topk(round(SENSITIVE * len(kept))).indices] = True
    magnitude = weight.abs().flatten().masked_fill(kept, -1)
    kept[magnitude.topk(round(OUTLIERS * len(kept))).indices] = True
    return kept.view_as(weight)


def channel_levels(
    points: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], bits: int
) -> np.ndarray[Any, Any]:
    """``2**bits`` levels for ``points``, sorted, by k-means on the weighted squared error. Where no more
    points have a weight than there are levels, all count alike."""
    # scikit-learn comes with the extra `calibrate`.
    from sklearn.cluster import KMeans

    count = 2**bits
    points, place = np.unique(points.astype(np.float64), return_inverse=True)
    if len(points) <= count:  # each is a level
        return np.pad(points, (0, count - len(points)), mode="edge" if len(points) else "constant")
    weight = np.bincount(place, weight.astype(np.float64))
    if (weight > 0).sum() <= count:
        weight = np.bincount(place).astype(np.float64)
    means = KMeans(count, n_init=1, tol=1e-7, random_state=0).fit(
        points[:, None], None, weight / weight.mean()
    )
    found: np.ndarray[Any, Any] = np.sort(means.cluster_centers_[:, 0])
    return found


def weight_bits(weights: Iterable[Tensor], bits: int) -> float:
    """Bits of an element, over all matrices: its code, the levels of each channel in fp16, and of the sparse
    part a value and a column of 16 bits each and row pointers of 32."""
    total = count = 0
    for weight in weights:
        rows, n = len(weight), weight.numel()
        kept = round(SENSITIVE * n) + round(OUTLIERS * n)
        total += bits * n + 16 * 2**bits * rows + (16 + 16) * kept + 32 * (rows + 1)
        count += n
    return total / count


def with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A copy of the model with ``weights`` in the place of its own of the same names."""
    other = copy.deepcopy(model)
    own = dict(other.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return other
