"""The only file that knows vLLM's names.

What is taken from vLLM, in the order of a start:

* ``EngineArgs.create_engine_config``: the method is read and checked before a model is loaded;
* ``get_attn_backend_cls`` of the platform: full-attention layers get `PagedBackend`. The CPU's own ignores
  which backend was asked for;
* ``Worker.get_kv_cache_spec``: the model is loaded, and vLLM asks what its layers keep. Each attention layer
  gets its codec, the bytes of its page, and a `Ring` beside it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker

from ...kernels.choose import packer_of
from ...methods import Method
from ...models import AttentionView
from .. import fit
from ..layer import Run, ServedLayer, Step
from ..rotary import Angles
from .guard import asked_for

_NAME = "CUSTOM"  # vLLM has a list of backends, and this place in it for others
_RING = "xquant_ring"


# -- before the model is loaded --------------------------------------------------------------------


def install() -> None:
    """Hook in; once for a process."""
    if getattr(EngineArgs.create_engine_config, "of_xquant", False):
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{PagedBackend.__name__}")
    _wrap(EngineArgs, "create_engine_config", _checked)
    _wrap(Worker, "get_kv_cache_spec", _prepared)
    platform = type(current_platform)
    chosen = platform.get_attn_backend_cls

    def choose(cls: Any, selected: Any, attn_selector_config: Any, **more: Any) -> Any:
        if _method_of(get_current_vllm_config()) is None or not _is_ours(attn_selector_config):
            return chosen(selected, attn_selector_config=attn_selector_config, **more)
        return AttentionBackendEnum.CUSTOM.get_path()

    platform.get_attn_backend_cls = classmethod(choose)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self), self, *args, **kwargs)

    wrapped.of_xquant = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _method_of(config: VllmConfig) -> Method | None:
    spec = asked_for(config.additional_config)
    return None if spec is None else fit.parse(spec)


def _is_ours(wanted: Any) -> bool:
    return wanted.attn_type == AttentionType.DECODER and not (
        wanted.use_mla or wanted.has_sliding_window or wanted.has_sink
    )


def _checked(original: Callable[..., Any], args: Any, *more: Any, **options: Any) -> Any:
    """An engine's configuration, with pages of the method's blocks."""
    selector._cached_get_attn_backend.cache_clear()  # of an earlier engine of this process
    spec = asked_for(args.additional_config)
    if spec is None:
        return original(*more, **options)
    method = fit.parse(spec)
    if args.block_size not in (None, method.group):
        raise ValueError(
            f"xquant: a page of {method.spec} is a block of {method.group} tokens, and block_size is"
            f" {args.block_size}"
        )
    args.block_size = method.group
    config = original(*more, **options)
    if why := _unfit(config):
        raise ValueError(f"xquant: {why}")
    model = config.model_config
    shards = config.parallel_config.tensor_parallel_size
    fit.check_model(method, model.hf_text_config, model.dtype, shards)
    return config


def _unfit(config: VllmConfig) -> str:
    """Why an engine of this configuration cannot be served; empty where it can."""
    parallel = config.parallel_config
    refused = {
        "a KV cache dtype of its own": config.cache_config.cache_dtype != "auto",
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
    }
    found = [name for name, here in refused.items() if here]
    return f"{found[0]} is not served yet" if found else ""


# -- the model is loaded ---------------------------------------------------------------------------


def _prepared(original: Callable[..., Any], worker: Any) -> Any:
    config: VllmConfig = worker.vllm_config
    method = _method_of(config)
    if method is not None:
        _prepare(worker.get_model(), config, method)
    return original()


def _prepare(model: nn.Module, config: VllmConfig, method: Method) -> None:
    """Give every attention layer its codec, its page and its ring.

    Raises:
        ValueError: vLLM's model has other parts than are known here.
    """
    found = [module for module in model.modules() if isinstance(_attention(module), Attention)]
    if not found:
        raise ValueError(f"xquant: no attention layer found in {type(model).__name__}")
    views = [_view(module, config.model_config.dtype) for module in found]
    codecs = method.codecs(views)
    packer = packer_of("auto")
    for parent, codec in zip(found, codecs, strict=True):
        layer: Any = _attention(parent)
        served = ServedLayer(
            codec,
            method.group,
            layer.impl.scale,
            None if codec.rotated else _angles(parent, codec.view),
            layer.impl.logits_soft_cap,
            packer,
        )
        ring = Ring(f"{layer.layer_name}.{_RING}", served, config.model_config.dtype)
        config.compilation_config.static_forward_context[ring.name] = ring
        layer.impl.served, layer.impl.ring = served, ring
        layer.get_kv_cache_spec = functools.partial(_page_spec, layer, served)


def _attention(module: Any) -> Any:
    return getattr(module, "attn", None)


def _view(parent: Any, dtype: torch.dtype) -> AttentionView:
    """What a method may ask of vLLM's layer, or of this shard of it."""
    layer: Any = _attention(parent)
    fused = getattr(parent, "qkv_proj", None)
    if fused is None or not isinstance(layer.impl, PagedImpl):
        raise ValueError(
            f"xquant: {type(parent).__name__} is not an attention layer of a known kind"
        )
    queries, width = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    return _View(
        index=extract_layer_index(layer.layer_name),
        module=parent,
        norm=None,
        hidden=fused.input_size,
        kv_heads=layer.num_kv_heads,
        query_heads=layer.num_heads,
        head_size=layer.head_size,
        key_module=fused,
        key_slice=slice(queries, queries + width),
        value_module=fused,
        value_slice=slice(queries + width, queries + 2 * width),
        key_norm=getattr(parent, "k_norm", None),
        rotary_size=getattr(getattr(parent, "rotary_emb", None), "rotary_dim", 0),
        given_dtype=dtype,
    )


@dataclass(eq=False)
class _View(AttentionView):
    """vLLM may have packed the weights for its own products, so their dtype says nothing."""

    given_dtype: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self.given_dtype


def _angles(parent: Any, view: AttentionView) -> Angles:
    rotary = getattr(parent, "rotary_emb", None)
    table = getattr(rotary, "cos_sin_cache", None)
    plain = getattr(rotary, "is_neox_style", False) and not getattr(rotary, "mrope_section", None)
    if table is None or not plain or table.shape[-1] != view.rotary_size:
        raise ValueError(
            f"xquant: keys before {type(rotary).__name__} cannot be had from vLLM: use a method that keeps"
            " keys after RoPE, such as kivi-4bit:rope=post"
        )
    return Angles(*table.chunk(2, -1))


def _page_spec(layer: Any, served: ServedLayer, config: VllmConfig) -> FullAttentionSpec:
    block = config.cache_config.block_size
    return FullAttentionSpec(
        block_size=block,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=torch.uint8,
        num_head_slots=1,
        state_content_bytes=-(-served.layout.nbytes // block),
    )


class Ring(nn.Module, AttentionLayerBase):
    """The tokens of a layer that are not in a whole block: a block of rows for each request."""

    def __init__(self, name: str, served: ServedLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.block, self.row, self.dtype = name, served.block, served.row, dtype
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CircularBufferSpec:
        return CircularBufferSpec(
            block_size=self.block,
            num_kv_heads=1,
            head_size=self.row,
            head_size_v=0,
            dtype=self.dtype,
            dcp_sharded=False,
        )


# -- a forward pass --------------------------------------------------------------------------------


class PagedBackend(AttentionBackend):
    """Pages of packed blocks, and rings."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return _NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        size = getattr(kv_cache_spec, "block_size", None)
        return [get_current_vllm_config().cache_config.block_size if size is None else size]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of all layers beside each other: rings then fit the room of a block's pages.
        return (KVCacheLayout.BLHNC,)


class StepBuilder(AttentionMetadataBuilder):
    """Makes a `Step` of what vLLM says of a batch, for pages and for rings."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:  # vLLM's own is abstract
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        given = common_attn_metadata
        starts = given.query_start_loc_cpu.tolist()
        lengths = given.seq_lens.tolist()
        found = [
            (number, Run(start, stop, length - (stop - start)))
            for number, (start, stop, length) in enumerate(
                zip(starts, starts[1:], lengths, strict=False)
            )
            if stop > start  # a batch may be filled up with requests of no tokens
        ]
        return Step(
            [run for _, run in found], given.block_table_tensor[[number for number, _ in found]]
        )


class PagedImpl(AttentionImpl):
    """Attends over one layer, by a `ServedLayer` that it is given when the model is loaded."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            raise ValueError("xquant: ALiBi and layers that share a cache are not served")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.served: ServedLayer | None = None
        self.ring: Ring | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM tries the model out
            return output.zero_()
        assert self.served is not None and self.ring is not None
        rings = self.ring.kv_cache
        self.served.bind(kv_cache.view(len(kv_cache), -1), rings[:, 0])
        found: Any = get_forward_context().attn_metadata
        step = found[self.ring.name]
        self.served.attend(query, key, value, attn_metadata, step.pages[:, 0], output)
        return output
