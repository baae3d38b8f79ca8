"""What can be served, and why the rest cannot: asked before an engine loads a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels.choose import choose, exact_of, packer_of
from ..methods import LayerCodec, Method
from ..models import AttentionView
from ..past.angles import Angles, rotates_halves
from ..past.pageable import unfit, unfit_options
from ..past.paged import PagedPast
from ..past.step import Retention
from ..quant.states import BITS, EVERY
from ..sizes import in_bytes
from ..spec import parse_method
from .build import Model, calibration_for, codecs_of, cut_by_head, shard_of

_METHOD = "xquant"
_PREFIX = "xquant_"
_CHOICES: dict[str, tuple[str, ...]] = {
    "attend": ("chunk", "store"),
    "kernel": ("auto", "reference"),
    "calibration": (),  # any text
    "ranges": ("method", "heads"),
}


@dataclass(frozen=True)
class Wanted:
    """What an engine is asked for in its configuration: ``xquant`` is the method's spec, ``xquant_attend``
    and ``xquant_kernel`` are as `KVCache` takes them."""

    method: Method
    attend: str = "chunk"
    kernel: str = "auto"
    calibration: str | None = None
    """A file; None for the stored one, of a method that calibrates itself."""
    ranges: str = "method"
    """Where ranges of a token end: as the method says, or at ``heads``, as tensor parallelism has it."""

    @property
    def through_store(self) -> bool:
        """Whether tokens also read the codes of blocks that their own step completes."""
        return self.attend == "store"

    @property
    def at_heads(self) -> bool:
        return self.ranges == "heads"

    def identity(self, model: Model) -> list[str]:
        """What tells codes of the same states apart: the spec, where ranges end, and the calibration."""
        found = calibration_for(self.method, model, self.calibration)
        return [self.method.spec, self.ranges, "" if found is None else found.digest]

    def block_of(self, given: int | None) -> int:
        """Tokens of an engine's block: those of a page.

        Raises:
            ValueError: another number is ``given``.
        """
        block = self.method.group
        if given not in (None, block):
            raise ValueError(
                f"xquant: a page of {self.method.spec} is a block of {block} tokens, and block_size is"
                f" {given}"
            )
        return block

    def layer(self, codec: LayerCodec, angles: Callable[[], Angles]) -> PagedPast:
        """A layer of an engine, which has these ``angles``."""
        block, device = self.method.group, codec.view.device
        return PagedPast(
            codec,
            block,
            None if codec.rotated else angles(),
            choose(codec, block, self.kernel).backend,
            packer_of(self.kernel, device),
            exact_of(self.kernel, device),
            self.method.sink,
        )

    def retention(self, drafts: int = 0) -> Retention:
        """Which tokens of a past lie where; ``drafts``: tokens that are guessed at a time."""
        return Retention.of(self.method, drafts, self.through_store)


@dataclass(frozen=True)
class ConnectorOptions:
    """Where an engine's connector keeps blocks, and how: its ``kv_connector_extra_config``."""

    path: str
    """Of a folder."""
    wanted: Wanted
    """Of the method that packs them."""
    nbytes: int | None
    """That the folder may take; None: as the disk has room."""
    engine: Wanted
    """What states are read through before they are stored."""
    every: int = EVERY
    """Tokens between two checkpoints, of a model with sliding windows or states beside attention."""
    state_bits: int = 16
    """Of each number that is stored of layers with windows or states."""

    @property
    def as_served(self) -> bool:
        """Whether the engine's own pages are what is stored."""
        own = self.engine
        return self.method == own.method and self.wanted.calibration == own.calibration

    @property
    def method(self) -> Method:
        return self.wanted.method

    def identity(self, model: Model) -> list[str]:
        """What tells stored blocks of one text and model apart: how they are packed, and what states were
        read through, since those of later tokens and layers are computed from what was read."""
        return [*self.wanted.identity(model), self.engine.attend, *self.engine.identity(model)]


_CONNECTOR_OPTIONS = ("path", "method", "limit", "calibration", "every", "state_bits")


def connector_options(options: Mapping[str, Any], engine: Wanted) -> ConnectorOptions:
    """What a connector's options ask for: ``path``, ``method`` (by default the engine's), ``limit``,
    ``calibration``, ``every`` and ``state_bits``.

    Raises:
        ValueError: one of them is unknown or none, or blocks have another size than the engine's pages.
    """
    for name in options:
        if name not in _CONNECTOR_OPTIONS:
            raise ValueError(
                f"xquant: a connector has no option '{name}': one of {', '.join(_CONNECTOR_OPTIONS)}"
            )
    path, given = options.get("path"), options.get("calibration")
    if not isinstance(path, str) or not path:
        raise ValueError("xquant: a connector needs the 'path' of a folder")
    if not isinstance(given, str | None):
        raise ValueError(f"xquant: a connector's 'calibration' is the name of a file, not {given!r}")
    method = parse(options["method"]) if "method" in options else engine.method
    if method == engine.method and given is None:
        given = engine.calibration
    if method.group != engine.method.group:
        raise ValueError(
            f"xquant: blocks of {method.spec} have {method.group} tokens, and the engine's pages"
            f" {engine.method.group}"
        )
    try:
        limit = in_bytes(options["limit"]) if "limit" in options else None
    except ValueError as error:
        raise ValueError(f"xquant: {error}") from None
    every, bits = options.get("every", EVERY), options.get("state_bits", 16)
    if type(every) is not int or every < 1:
        raise ValueError(f"xquant: a connector's 'every' is a number of tokens, not {every!r}")
    if type(bits) is not int or bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise ValueError(f"xquant: a connector's 'state_bits' is one of {known}, not {bits!r}")
    stored = Wanted(method, calibration=given, ranges=engine.ranges)
    return ConnectorOptions(path, stored, limit, engine, every, bits)


def wanted(options: Mapping[str, Any]) -> Wanted:
    """What these options of a configuration ask for.

    Raises:
        ValueError: it is nothing, or cannot be served; the message says why.
    """
    known = [_METHOD, *(_PREFIX + each for each in _CHOICES)]
    for name in options:
        if name not in known:
            raise ValueError(f"xquant: no option '{name}': one of {', '.join(known)}")
    if options.get(_METHOD) is None:
        others = ", ".join(name for name in options if name != _METHOD) or "it is null"
        raise ValueError(f"xquant: no method, xquant=SPEC ({others}): leave all of them out for none")
    method = parse(options[_METHOD])
    given = {name.removeprefix(_PREFIX): value for name, value in options.items() if name != _METHOD}
    for name, value in given.items():
        if not isinstance(value, str) or value not in (_CHOICES[name] or (value,)):
            choices = " or ".join(_CHOICES[name]) or "the name of a file"
            raise ValueError(f"xquant: {_PREFIX}{name} is {choices}, not {value!r}")
    if method.tail and given.get("attend") == "store":
        raise _refused(method, "xquant_attend=store leaves no recent tokens as they are")
    return Wanted(method, **given)


def parse(spec: Any) -> Method:
    """The method that an engine is asked for.

    Raises:
        ValueError: it is none, or cannot be served; the message says why.
    """
    if not isinstance(spec, str):
        raise ValueError(f"xquant: the method is a spec string, not {type(spec).__name__}")
    try:
        method = parse_method(spec)
    except ValueError as error:
        raise ValueError(f"xquant: {error}") from None
    if why := unfit_options(method):
        raise _refused(method, why)
    return method


def check_model(wanted: Wanted, model: Model, stored: bool = False) -> list[LayerCodec]:
    """The codecs of a model that is not loaded, without weights; ``stored`` as of `codecs_for`.

    Raises:
        ValueError: the model or the method for it cannot be served; the message says why.
    """
    codecs = codecs_for(wanted, model, None, 0, weighted=False, stored=stored)
    if not all(codec.rotated or rotates_halves(codec.view) for codec in codecs):
        raise _refused(wanted.method, "it keeps keys before RoPE, and the model's does not rotate halves")
    return codecs


def codecs_for(
    wanted: Wanted,
    model: Model,
    layers: Sequence[AttentionView] | None,
    rank: int,
    weighted: bool = True,
    stored: bool = False,
) -> list[LayerCodec]:
    """The codecs of one shard.

    Args:
        layers: the engine's own, of this shard.
        weighted: whether to build what is computed from weights; otherwise only what tells of it.
        stored: they pack whole blocks of all layers for storage, rather than serve.

    Raises:
        ValueError: the model or the method for it cannot be served; the message says why.
    """
    method, shards = wanted.method, model.shards
    try:
        if layers is not None and [v.index for v in layers] != [v.index for v in model.layers]:
            raise ValueError("other layers attend to all tokens here than in transformers")
        calibration = calibration_for(method, model, wanted.calibration)
        if calibration is not None and shards > 1:
            calibration = cut_by_head(calibration, method, model, rank)
        if layers is None or method.built_from_weights:
            whole = model.weighted if weighted and method.built_from_weights else model.layers
            layers = shard_of(whole, rank, shards)
        codecs = codecs_of(method, layers, calibration, wanted.at_heads or shards > 1)
    except ValueError as error:
        raise _refused(method, str(error)) from None
    if why := unfit(codecs, stored):
        raise _refused(method, why)
    return codecs


def _refused(method: Method, why: str) -> ValueError:
    return ValueError(f"xquant: {method.spec} cannot be served: {why}")
