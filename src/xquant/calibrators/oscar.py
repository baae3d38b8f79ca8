"""Statistics for OSCAR (arXiv 2605.17757): covariances of a layer's queries, and of its values weighted with
what queries make of their tokens' keys."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..methods.key_value import KeyValueCodec
from ..methods.oscar import Oscar, spread
from ..models import AttentionView
from ..quant import Plain
from .calibrator import Rows, Stage


class OscarCalibrator:
    """Finds ``key.turn`` and ``value.turn`` of each layer, ``[G, D, D]`` or for all heads ``[D, D]``: the
    matrices by which `OscarCodec` rotates heads."""

    def __init__(self, method: Oscar, views: Sequence[AttentionView]) -> None:
        self.method = method
        self.codecs = [KeyValueCodec(v, Plain(v.dtype), Plain(v.dtype), "post") for v in views]
        self._queries = QueryStage(views)
        self._values = ValueStage(views, self._queries.sums)

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        yield self._queries
        yield self._values

    def tensors(self) -> dict[str, Tensor]:
        pairs = zip(self._queries.sums, self._values.covariances(), strict=True)
        return {
            f"{i}.{name}.turn": self._rotation(covariances)
            for i, pair in enumerate(pairs)
            for name, covariances in zip(("key", "value"), pair, strict=True)
        }

    def _rotation(self, covariances: Tensor) -> Tensor:
        if self.method.matrix == "layer":
            return spread(covariances.mean(0))
        return torch.stack([spread(each) for each in covariances])


class QueryStage:
    """The first pass: for each key head, the sum of ``q q^T`` over the queries that meet its keys."""

    gradients = False
    queries = True

    def __init__(self, views: Sequence[AttentionView]) -> None:
        self._views = views
        self.sums = [_zeros(view.kv_heads, view.head_size) for view in views]

    def see(self, position: int, rows: Rows) -> None:
        view = self._views[position]
        assert rows.query is not None
        # Query heads that share a key head follow each other.
        met = rows.query.unflatten(-1, (view.kv_heads, -1, view.head_size))
        heads = met.transpose(0, 1).flatten(1, 2).float()
        self.sums[position] += (heads.mT @ heads).double().cpu()


class ValueStage:
    """The second: for each value head, the mean of ``v v^T``, where a token weighs ``k^T C k``, ``C`` the
    covariance of the queries that meet its key ``k``."""

    gradients = queries = False

    def __init__(self, views: Sequence[AttentionView], queries: Sequence[Tensor]) -> None:
        self._views, self._queries = views, queries
        self._sums = [_zeros(view.kv_heads, view.value_size) for view in views]
        self._weights = [torch.zeros(view.kv_heads, dtype=torch.float64, device="cpu") for view in views]

    def see(self, position: int, rows: Rows) -> None:
        view, covariance = self._views[position], self._queries[position]
        key, value = (t.float().transpose(0, 1) for t in view.by_head((rows.key, rows.value)))
        scale = covariance.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo().tiny)
        unit = (covariance / scale[:, None, None]).to(key)
        weight = ((key @ unit) * key).sum(-1).clamp_min(0)
        self._sums[position] += ((value * weight[..., None]).mT @ value).double().cpu()
        self._weights[position] += weight.sum(1).double().cpu()

    def covariances(self) -> list[Tensor]:
        """Of each layer, ``[G, D, D]``."""
        tiny = torch.finfo().tiny
        pairs = zip(self._sums, self._weights, strict=True)
        return [total / weight.clamp_min(tiny)[:, None, None] for total, weight in pairs]


def _zeros(heads: int, size: int) -> Tensor:
    return torch.zeros(heads, size, size, dtype=torch.float64, device="cpu")
