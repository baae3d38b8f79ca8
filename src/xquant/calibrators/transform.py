"""Statistics for transform coding: the basis of a layer's keys and values in which bits are worth most.

Letters: ``W`` numbers of a token, its keys before RoPE and its values; ``C`` channels of the basis. Rows of
all layers are kept in fp16 until the end: ``2 W`` bytes a token and layer, 2.0 GB for 15,360 tokens of a
model with 32 layers of ``W = 2,048``. So are gradients in bf16, of the first 8,192 tokens: 1.1 GB.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.choose import packer_of
from ..methods.base import spans
from ..methods.key_value import KeyValueCodec
from ..methods.transform import Transform, channels, quantizer_of, side_bits
from ..methods.transform_cl import cost_channel, cost_scale, with_costs
from ..models import AttentionView
from ..models.weights import home
from ..quant import Plain
from ..quant.affine import FP16_MAX
from ..quant.ranked import allot
from ..quant.trellis import CIRCLE
from ..threads import one_thread
from .bases import (
    PREDICTION_RIDGE,
    best_basis,
    dealt_out,
    mean_of,
    own_basis,
    predict,
    products,
    ridged,
    root_of,
    same_head,
)
from .calibrator import Rows, Stage
from .costs import direction
from .spectra import SINKS, blocks, by_class, spectrum

GRADIENT_TOKENS = 8192
"""Of how many tokens gradients are taken: those of twice as many take off 1 to 3% of KL (docs/log.md)."""
TOKENS_A_FUNCTION = 2
"""How many different tokens must be seen for each number that is kept of an embedding. Of fewer tokens all is
learned by heart, and what is then predicted of others is anything."""
TOKENS_AT_ONCE = 8192
"""Tokens of the vocabulary whose embeddings are looked up at a time."""
LOOP_BITS = 1.5
"""Bits a value at which a layer is quantized before the layer above learns to predict from it."""


class TransformCalibrator:
    """Finds the tensors of each layer.

    * ``analysis`` ``[C, W]``, ``synthesis`` ``[W, C]`` and ``mean`` ``[W]``: what is packed of a row ``y`` is
      ``analysis @ (y - mean)``;
    * ``usual`` ``[C]``: the usual scale of every channel, see `Ranked`;
    * ``profile`` ``[C]``: the mean variance in a block of the channel of each rank. In it and in ``usual``
      the rests of channels have their places, too;
    * with gradients ``costs`` ``[W]``: times a row it is the logarithm of what an error of one unit in the
      token costs, up to a constant, see `costs`;
    * with classes of tokens ``usual`` and ``profile`` are ``[classes C]``, of one class after the other, the
      costliest first, and the profile of a class is times what errors in it cost;
    * where keys come first, ``from_keys`` ``[C - Ck, Ck]``: what the first ``Ck`` channels, from which alone
      keys are made, predict of the others: see `Segment`. Ranks are then those of either part;
    * with prediction, ``predictor`` ``[W, W']`` and ``of_token`` ``[W, E]``: a row is expected to be
      ``predictor @ y' + of_token @ e + mean``, where ``y'`` are the decoded rows of the layers below, the
      nearest layer first, and ``e`` is the token's row of
    * ``embedding`` ``[V, E]``, of all layers: what predicts keys and values best of the embeddings of tokens.
    """

    def __init__(self, method: Transform, views: Sequence[AttentionView]) -> None:
        self.method = method
        self.codecs = [KeyValueCodec(v, Plain(v.dtype), Plain(v.dtype), "pre") for v in views]
        self.stage = StatisticsStage(len(views), method.metric == "fisher", method.weighs_tokens)

    def stages(self, samples: int, length: int) -> Iterator[Stage]:
        if length < CIRCLE:
            raise ValueError(f"samples of {length} tokens fill no block: give {CIRCLE} or more")
        yield self.stage

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        below, of_tokens = list[Tensor](), None
        views = [codec.view for codec in self.codecs]
        if count := self.method.known(views):
            found["embedding"] = table = self._embedding(views[0], count)
            of_tokens = table[self.stage.ids].float()
        for numbers in spans(range(len(views)), self.method.layers_together):
            rows = [self.stage.rows(number) for number in numbers]
            if self.method.finds_keys_first(views[numbers[0]]):
                layers = [self._keys_first(numbers[0], rows[0])]
            else:
                layers, residual = self._span(numbers, rows, Known(below, of_tokens))
            if depth := self.method.layers_below:
                below = [*as_read(rows, residual, layers)[::-1], *below][:depth]
            for number, layer in zip(numbers, layers, strict=True):
                found |= {f"{number}.{name}": tensor for name, tensor in layer.items()}
        return found

    def _embedding(self, view: AttentionView, count: int) -> Tensor:
        """``count`` numbers for every token of the vocabulary, fp16 ``[V, count]``: those linear functions of
        its embedding that predict the rows of all layers best, errors weighed by the layers' metrics
        (reduced-rank regression). After few different tokens the last of them are 0."""
        assert view.embed is not None
        seen = normed(view.embed, self.stage.ids.flatten())
        mean = seen.mean(0)
        seen -= mean
        covariance = seen.T @ seen / len(seen)
        ridge = PREDICTION_RIDGE * covariance.diagonal().mean().clamp(min=1e-30)
        covariance.diagonal().add_(ridge)
        explained = torch.zeros_like(covariance)
        with one_thread():
            root = torch.linalg.cholesky(covariance)
            for number in range(len(self.codecs)):
                rows = self.stage.rows(number).flatten(0, 1)
                rows = (rows - rows.mean(0)).double() @ root_of(self.stage.metric(number))
                part = torch.linalg.solve_triangular(root, seen.T @ rows / len(rows), upper=False)
                explained += part @ part.T
            _, vectors = torch.linalg.eigh(explained)
            most = max(1, min(count, len(self.stage.ids.unique()) // TOKENS_A_FUNCTION))
            best = torch.linalg.solve_triangular(root.T, vectors.flip(1)[:, :most], upper=True)
        best = torch.nn.functional.pad(best, (0, count - best.shape[1]))
        every = torch.arange(view.vocabulary, device="cpu").split(TOKENS_AT_ONCE)
        return torch.cat([((normed(view.embed, ids) - mean) @ best).half() for ids in every])

    def _span(
        self, numbers: Sequence[int], rows: Sequence[Tensor], known: "Known"
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """The tensors of layers that are coded together, from their rows ``[N, T, W]`` and what these are
        predicted from; and what the prediction leaves of the rows, side by side."""
        views = [self.codecs[number].view for number in numbers]
        widths = [view.state_width for view in views]
        residual = torch.cat([*rows], -1)
        found: list[dict[str, Tensor]] = [{} for _ in views]
        mean = mean_of(residual)
        if known:
            every = torch.cat(known.parts, -1)
            predictor, mean = predict(every, residual)
            found = [known.split(own) for own in predictor.split(widths)]
            residual = residual - every @ predictor.T
        residual = residual - mean
        roots = []
        for view, number in zip(views, numbers, strict=True):
            metric = self.stage.metric(number)
            if self.method.basis == "head":
                metric = metric * same_head(view)
            roots.append(root_of(metric))
        covariance = products(residual, residual)
        if self.method.basis == "head":
            covariance = covariance * torch.block_diag(*map(same_head, views))
        counts = [channels(view) for view in views]
        analysis, synthesis = best_basis(covariance, torch.block_diag(*roots), sum(counts))
        places = dealt_out(counts)
        parts = mean.split(widths), synthesis[:, torch.cat(places)].split(widths)
        of_layers = zip(numbers, found, places, *parts, strict=True)
        for number, layer, own, of_mean, of_synthesis in of_layers:
            layer |= {"mean": of_mean.clone(), "analysis": analysis[own].half()}
            layer["synthesis"] = of_synthesis.half().contiguous()
            states = residual @ layer["analysis"].float().T
            layer |= self._spectrum(number, states, layer["synthesis"])
        return found, residual

    def _spectrum(self, number: int, states: Tensor, synthesis: Tensor) -> dict[str, Tensor]:
        """``costs``, where errors of tokens are weighed, and `spectrum` of the states of a layer, or of each
        class of its tokens."""
        layer: dict[str, Tensor] = {}
        if self.method.weighs_tokens:
            layer["costs"], due = self._costs(number, synthesis)
            if self.method.classes > 1:
                dear = self.stage.rows(number) @ layer["costs"]
                return layer | by_class(states, dear, due, self.method.classes)
        return layer | spectrum(states, self.method.rests(self.codecs[number].view))

    def _costs(self, number: int, synthesis: Tensor) -> tuple[Tensor, Tensor]:
        """The function of rows that tells what an error of one unit in any channel of a token costs, see
        `costs`; and what it does cost in the first samples, ``[N', T]``. Where nothing reads the layer, all
        tokens cost the same."""
        due = (self.stage.gradients_of(number) @ synthesis.float()).square().mean(-1)
        usual = due[:, SINKS:].mean()
        due = due / usual if usual > 0 else torch.ones_like(due)
        rows = self.stage.rows(number)[: len(due)]
        return direction(rows[:, SINKS:], due[:, SINKS:]), due

    def _keys_first(self, number: int, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of a layer whose keys have channels of their own, from its rows ``[N, T, W]``.

        In the metric ``F`` errors of keys and of values are not independent: what an error of a key costs
        depends on the error of the value. Adding ``F_vv^-1 F_vk`` times the keys to the values removes that,
        so keys and these sums can be coded apart. Then what the decoded keys predict of the sums is
        subtracted, and only the rest is coded. That loses something only where codes are so coarse that
        decoded keys predict less.
        """
        width = self.codecs[number].view.kv_width
        metric = ridged(self.stage.metric(number))
        keys, values = rows.tensor_split([width], -1)
        across, of_values = metric[width:, :width], metric[width:, width:]
        with one_thread():
            added = torch.linalg.solve(of_values, across)
        own, centred = own_basis(keys, metric[:width, :width] - across.T @ added)
        added = added.float()
        (read,) = as_read([keys], centred, [own])
        sums = values + keys @ added.T
        predictor, _ = predict(read, sums)
        rest, _ = own_basis(sums - read @ predictor.T, of_values)
        back = predictor - added  # what values get of the decoded keys
        found = {name: torch.cat([own[name], rest[name]]) for name in ("mean", "usual", "profile")}
        found["mean"][width:] += back @ own["mean"]
        analysis, synthesis = (torch.block_diag(own[name], rest[name]) for name in ("analysis", "synthesis"))
        analysis[width:, :width] = rest["analysis"] @ added
        synthesis[width:, :width] = back @ own["synthesis"]
        if self.method.weighs_tokens:
            found["costs"], _ = self._costs(number, synthesis)
        from_keys = analysis[width:] @ synthesis[:, :width]
        halves = {"analysis": analysis, "synthesis": synthesis, "from_keys": from_keys}
        return found | {name: each.half() for name, each in halves.items()}


class Known(NamedTuple):
    """What the rows of a layer are predicted from."""

    below: list[Tensor]
    """The decoded rows of the layers below ``[N, T, W]``, the nearest first."""
    of_tokens: Tensor | None
    """What is known of the tokens, ``[N, T, E]``."""

    @property
    def parts(self) -> list[Tensor]:
        return [*self.below, *([] if self.of_tokens is None else [self.of_tokens])]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def split(self, predictor: Tensor) -> dict[str, Tensor]:
        """The tensors of an artifact for a predictor from all `parts`, ``[W, W' + E]``."""
        last = 0 if self.of_tokens is None else self.of_tokens.shape[-1]
        below, of_token = predictor.half().split([predictor.shape[1] - last, last], 1)
        found = {"predictor": below, "of_token": of_token}
        return {name: part.contiguous() for name, part in found.items() if part.shape[1]}


class StatisticsStage:
    """The only pass: keeps all rows, and sums the products of the gradients of the first `GRADIENT_TOKENS`
    (the empirical Fisher information)."""

    queries = False

    def __init__(self, layers: int, gradients: bool, keeps: bool = False) -> None:
        self._fisher, self._keeps = gradients, keeps
        self._gradients: list[list[Tensor]] = [[] for _ in range(layers)]
        self._rows: list[list[Tensor]] = [[] for _ in range(layers)]
        self._products: list[Tensor] = []
        self._ids: list[Tensor] = []

    @property
    def gradients(self) -> bool:
        return self._fisher and sum(map(len, self._ids)) < GRADIENT_TOKENS

    @property
    def ids(self) -> Tensor:
        """Of all tokens, int64 ``[N, T]``."""
        return torch.stack(self._ids)

    def see(self, position: int, rows: Rows) -> None:
        if position == 0:
            self._ids.append(rows.ids.cpu())
        states = torch.cat([rows.key, rows.value], -1)
        self._rows[position].append(states.float().clamp(-FP16_MAX, FP16_MAX).half().cpu())
        if rows.key_gradient is None or rows.value_gradient is None:
            return
        gradient = torch.cat([rows.key_gradient, rows.value_gradient], -1).float()
        if self._keeps:
            self._gradients[position].append(gradient.bfloat16().cpu())
        gradient = gradient[SINKS:]
        product = (gradient.T @ gradient).cpu()
        if len(self._products) <= position:
            self._products.append(product)
        else:
            self._products[position] += product

    def rows(self, position: int) -> Tensor:
        """All rows of a layer, fp32 ``[N, T, W]``."""
        return torch.stack(self._rows[position]).float()

    def gradients_of(self, position: int) -> Tensor:
        """Those of the rows of a layer that were taken, fp32 ``[N', T, W]``, of the first ``N'`` samples,
        where it keeps them."""
        return torch.stack(self._gradients[position]).float()

    def metric(self, position: int) -> Tensor:
        """The metric of a layer, ``[W, W]`` in fp64: how much an error in its rows costs. All layers have
        the same unit.

        Raises:
            ValueError: the gradients of all layers are 0.
        """
        if not self._fisher:
            return torch.eye(self._rows[position][0].shape[-1], dtype=torch.float64, device="cpu")
        unit = torch.stack([product.diagonal().mean() for product in self._products]).mean()
        if unit == 0:
            raise ValueError("the calibration text leaves no gradient: give another")
        return self._products[position].double() / unit


@torch.no_grad()
def normed(embedding: torch.nn.Embedding, ids: Tensor) -> Tensor:
    """Embeddings of tokens ``[M]``, fp64 ``[M, d]``, divided by their root mean square."""
    rows = embedding(ids.to(home(embedding))).double().cpu()
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)


def as_read(rows: list[Tensor], residual: Tensor, layers: list[dict[str, Tensor]]) -> list[Tensor]:
    """Rows ``[N, T, W]`` of layers that are coded together, their ``residual`` quantized at `LOOP_BITS` and
    decoded. Sinks, and tokens that fill no block, stay as they are."""
    states = [residual @ found["analysis"].float().T for found in layers]
    size, of_states = blocks(states[0])[0].shape[1], states[0].shape[-1]
    classes, rests = divmod(len(layers[0]["usual"]), of_states)
    states = [torch.nn.functional.pad(each, (0, rests)) for each in states]
    usual, costs = [found["usual"] for found in layers], None
    profiles = [profile for found in layers for profile in found["profile"].chunk(classes)]
    if "costs" in layers[0]:
        dear = [(own @ found["costs"])[..., None] for own, found in zip(rows, layers, strict=True)]
        states = [with_costs(*each, rests) for each in zip(states, dear, strict=True)]
        usual, costs = [cost_scale(each, classes, rests) for each in usual], cost_channel(of_states)
        profiles = [torch.nn.functional.pad(profile, (0, 1)) for profile in profiles]
    budget = (int(LOOP_BITS * residual.shape[-1]) - side_bits(profiles, size, classes)) * classes
    counts = iter(allot(profiles, max(budget, 0)))
    losses, packer = [], packer_of("auto", residual.device)
    for each, own_usual, found in zip(states, usual, layers, strict=True):
        quantizer = quantizer_of(own_usual, list(islice(counts, classes)), costs, rests)
        parts, sinks = blocks(each)
        read = torch.empty_like(parts)
        packer.unpack(quantizer, packer.pack(quantizer, parts, sinks), read)
        count = len(found["analysis"])
        read[..., :rests] += read[..., read.shape[-1] - rests :]
        losses.append((parts - read)[..., :count].reshape(len(each), -1, count))
    loss, out = torch.cat(losses, -1), []
    for own, found in zip(rows, layers, strict=True):
        coded = own.clone()
        coded[:, SINKS : loss.shape[1]] -= (loss @ found["synthesis"].float().T)[:, SINKS:]
        out.append(coded)
    return out
