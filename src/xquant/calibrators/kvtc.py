"""Statistics for KVTC (arXiv 2511.01815): principal components over layers, and what each width of codes
loses of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..methods.key_value import KeyValueCodec
from ..methods.kvtc import KVTC, choices
from ..models import AttentionView
from ..quant import Affine, Plain
from ..threads import one_thread
from .calibrator import Stage
from .spectra import SINKS
from .transform import StatisticsStage

SAMPLE = 1024
"""Tokens whose components are quantized to see what that loses."""


class KVTCCalibrator:
    """Finds what is stored of the layers of each span, which share principal components.

    * ``mean`` ``[W]`` of each layer's row of ``W`` numbers;
    * ``KIND.basis`` ``[P, W']`` of each layer, for each kind of numbers (`KVTC.kinds`: keys, values, or
      both): the part for its ``W'`` numbers of the ``P`` components of the span, the largest component first;
    * ``KIND.error`` ``[.]`` of the lowest layer of a span: the mean squared error of a token with each of the
      `choices` of how many bits which components get.
    """

    def __init__(self, method: KVTC, views: Sequence[AttentionView]) -> None:
        self.method = method
        self.codecs = [KeyValueCodec(v, Plain(v.dtype), Plain(v.dtype), "pre") for v in views]
        self.stage = StatisticsStage(len(views), gradients=False)

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        if length <= SINKS:
            raise ValueError(f"samples of {length} tokens are all sinks: give {SINKS + 1} or more")
        yield self.stage

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for span in self.method.spans(len(self.codecs)):
            means: dict[int, list[Tensor]] = {number: [] for number in span}
            for kind in self.method.kinds(self.codecs[span[0]].view):
                rows = [self._rows(number)[kind] for number in span]
                widths = [each.shape[-1] for each in rows]
                mean, basis, error = components(torch.cat(rows, -1))
                found[f"{span[0]}.{kind}.error"] = error
                columns = zip(span, mean.split(widths), basis.split(widths, 1), strict=True)
                for number, own_mean, own in columns:
                    means[number].append(own_mean)
                    found[f"{number}.{kind}.basis"] = own.contiguous()
            found |= {f"{number}.mean": torch.cat(own) for number, own in means.items()}
        return found

    def _rows(self, number: int) -> dict[str, Tensor]:
        """The rows of all tokens of a layer but sinks, ``[M, .]`` of each kind."""
        rows = self.stage.rows(number)[:, SINKS:].flatten(0, 1)
        kinds = self.method.kinds(self.codecs[number].view)
        return dict(zip(kinds, rows.split([*kinds.values()], -1), strict=True))


def components(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean ``[P]`` of rows ``[M, P]``; their principal components, fp16 ``[P, P]``, the largest first;
    and the `errors` of each of the `choices`."""
    mean = rows.mean(0)
    rows = rows - mean
    with one_thread():
        _, vectors = torch.linalg.eigh((rows.T @ rows / len(rows)).double())
    basis = vectors.flip(1).T.half()
    sample = rows[:: -(-len(rows) // SAMPLE)] @ basis.float().T
    return mean, basis, errors(sample)


def errors(states: Tensor) -> Tensor:
    """The mean squared error of a token with each of the `choices`, measured on components ``[M, P]``."""
    found = []
    for start, count, bits in choices(states.shape[1]):
        part = states[None, :, start : start + count]
        read = torch.zeros_like(part)
        if bits:
            quantizer = Affine(bits, "token", 0)
            quantizer.decode(quantizer.encode(part, None), read)
        found.append((part - read).square().sum() / len(states))
    return torch.stack(found) if found else states.new_empty(0)
