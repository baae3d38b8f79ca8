"""Where the plugin hooks into vLLM: docs/engines.md says how."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker

from xquant.kernels.call import AttentionCall
from xquant.models import AttentionView
from xquant.past.angles import Angles
from xquant.past.noted import Noted
from xquant.past.paged import PagedPast
from xquant.past.sequences import FixedSequences
from xquant.past.step import Batch, Retention, in_whole_blocks
from xquant.serve import fit
from xquant.serve.build import DTYPES, EngineView
from xquant.serve.capacity import Room, room_of
from xquant.serve.described import described, left_to_torch

from . import states
from .checks import CONNECTOR, checked, drafts_of, logger, model_of, rotary_angles, wanted_of
from .dtype import make_known
from .guard import is_wrapped, refusing, wrap

_NAME = "CUSTOM"  # vLLM has a list of backends, and this place in it for others
RING = "xquant_ring"


# -- where it hooks in ------------------------------------------------------------------------------


def install() -> None:
    """Hook in; once for a process."""
    if is_wrapped(EngineArgs, "create_engine_config"):
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{PagedBackend.__name__}")
    KVConnectorFactory.register_connector(CONNECTOR, f"{__package__}.connector", CONNECTOR)
    wrap(EngineArgs, "create_engine_config", checked)
    wrap(Scheduler, "__init__", _scheduled)
    wrap(Worker, "__init__", _told)
    wrap(Worker, "get_kv_cache_spec", _prepared)
    wrap(Worker, "execute_model", _noted)
    states.install()
    platform = type(current_platform)
    chosen = platform.get_attn_backend_cls

    def choose(cls: Any, selected: Any, attn_selector_config: Any, **more: Any) -> Any:
        if found := wanted_of(get_current_vllm_config()) and _backend(attn_selector_config):
            return f"{__name__}.{found.__name__}"
        return chosen(selected, attn_selector_config=attn_selector_config, **more)

    platform.get_attn_backend_cls = classmethod(choose)


def _backend(layer: Any) -> type[AttentionBackend] | None:
    if layer.has_sliding_window:
        return WindowBackend
    plain = layer.attn_type == AttentionType.DECODER and not layer.use_mla
    return PagedBackend if plain else None


def _told(
    original: Callable[..., Any], worker: Any, vllm_config: VllmConfig, *more: Any, **options: Any
) -> None:
    # vLLM asks what the cache's dtype is wherever it makes a layer.
    make_known(vllm_config)
    original(vllm_config, *more, **options)


def _scheduled(
    original: Callable[..., Any], scheduler: Any, vllm_config: VllmConfig, *more: Any, **options: Any
) -> None:
    make_known(vllm_config)
    original(vllm_config, *more, **options)
    wanted = wanted_of(vllm_config)
    if wanted is not None and wanted.through_store:
        # vLLM's own reason to end chunks with blocks is the state of a Mamba layer.
        scheduler.need_mamba_block_aligned_split = True
        cut = functools.partial(in_whole_blocks, wanted.method.group)
        scheduler._mamba_block_aligned_split = cut


# -- the model is loaded ---------------------------------------------------------------------------


@refusing
def _prepared(original: Callable[..., Any], worker: Any) -> Any:
    """Give every attention layer its codec, its page and its ring.

    Raises:
        ValueError: vLLM's model has other parts than are known here.
    """
    config, model = worker.vllm_config, worker.get_model()
    wanted = wanted_of(config)
    if wanted is None:
        return original()
    found = [module for module in model.modules() if isinstance(_attention(module), Attention)]
    found = [module for module in found if _attention(module).sliding_window is None]
    if not found:
        raise ValueError(f"xquant: no attention layer found in {type(model).__name__}")
    dtype = config.model_config.dtype
    views = [_view(module, dtype) for module in found]
    known, angles = model_of(config), functools.cache(rotary_angles)
    codecs = fit.codecs_for(wanted, known, views, get_tensor_model_parallel_rank())
    retention = wanted.retention(drafts_of(config))
    room = room_of(codecs, retention, known, states.states_of(config))
    if get_tensor_model_parallel_rank() == 0:
        logger.info("xquant: %s", described(wanted, known, codecs, room, config.model_config.max_model_len))
        if why := left_to_torch(wanted, codecs, room.block):
            logger.warning("xquant: torch attends in place of kernels, which is slower: %s", why)
    for place, (parent, codec) in enumerate(zip(found, codecs, strict=True)):
        layer: Any = _attention(parent)
        rotary = getattr(parent, "rotary_emb", None)
        angles_of = functools.partial(angles, rotary, codec.view.rotary_size)
        served = wanted.layer(codec, angles_of)
        ring = Ring(f"{layer.layer_name}.{RING}", served.row, retention, dtype)
        config.compilation_config.static_forward_context[ring.name] = ring
        layer.impl.served, layer.impl.ring, layer.impl.angles = served, ring, angles_of
        layer.impl.moved = room.starts[place] - place * room.page
        layer.get_kv_cache_spec = functools.partial(_page_spec, layer, room)
    return original()


def _attention(module: Any) -> Any:
    return getattr(module, "attn", None)


def _view(parent: Any, dtype: torch.dtype) -> AttentionView:
    """What a method may ask of vLLM's layer, or of this shard of it."""
    layer: Any = _attention(parent)
    fused = getattr(parent, "qkv_proj", None)
    if fused is None or not isinstance(layer.impl, PagedImpl):
        raise ValueError(f"xquant: {type(parent).__name__} is no attention layer that is known")
    index, heads = extract_layer_index(layer.layer_name), (layer.num_heads, layer.num_kv_heads)
    norm, rotary = getattr(parent, "k_norm", None), getattr(parent, "rotary_emb", None)
    rotary_size = getattr(rotary, "rotary_dim", 0)
    return EngineView.of(index, parent, fused, heads, layer.head_size, norm, rotary_size, dtype)


def _page_spec(layer: Any, room: Room, config: VllmConfig) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=room.block,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=torch.uint8,
        num_head_slots=1,
        state_content_bytes=room.share,
    )


class Ring(nn.Module, AttentionLayerBase):
    """The tokens of a layer that are not in a whole block: a block of rows for each request."""

    def __init__(self, name: str, row: int, retention: Retention, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.retention, self.row, self.dtype = name, retention, row, dtype
        self.kv_cache = torch.tensor([], device="cpu")

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CircularBufferSpec:
        return CircularBufferSpec(
            block_size=self.retention.block,
            num_kv_heads=1,
            head_size=self.retention.width(self.row),
            head_size_v=0,
            dtype=self.dtype,
            dcp_sharded=False,
        )


# -- a forward pass --------------------------------------------------------------------------------


_begun = Noted(2)
"""By the number of a ring, of the request that has it: how many tokens were found when it began, and how many
it is to read before it writes one."""


def _noted(original: Callable[..., Any], worker: Any, scheduler_output: Any) -> Any:
    """A ring holds what its request computed; of a prefix that was found, it holds nothing."""
    found = [
        (new.block_ids, new.num_computed_tokens, new.prompt_len)
        for new in scheduler_output.scheduled_new_reqs
    ]
    old = scheduler_output.scheduled_cached_reqs
    again = zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True)
    for name, blocks, count in again:
        if name in old.resumed_req_ids:
            found.append((blocks, count, worker.model_runner.requests[name].num_tokens))
    for blocks, count, tokens in found:
        for group in blocks:
            if group:
                _begun.note(group[0], count, tokens)
    return original(scheduler_output)


class PagedBackend(AttentionBackend):
    """Pages of packed blocks, and rings."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return _NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        size = getattr(kv_cache_spec, "block_size", None)
        return [get_current_vllm_config().cache_config.block_size if size is None else size]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of all layers beside each other: rings then fit the room of a block's pages.
        return (KVCacheLayout.BLHNC,)


class WindowBackend(cpu_attn.CPUAttentionBackend):
    """vLLM's own, for layers with sliding windows. It reads a block wherever that lies."""

    supported_kv_cache_layouts = PagedBackend.supported_kv_cache_layouts


class BatchBuilder(AttentionMetadataBuilder):
    """Makes a `Batch` of what vLLM says, for pages and for rings."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:  # vLLM's own is abstract
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._memory = FixedSequences(device, vllm_config.scheduler_config.max_num_seqs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        given = common_attn_metadata
        starts, lengths = given.query_start_loc, given.seq_lens
        # More than there are only where drafts are a model's, which are refused.
        known = lengths if lengths.is_cpu else given.seq_lens_cpu_upper_bound
        host = given.query_start_loc_cpu.tolist(), known.tolist()
        told = (starts.numpy(), lengths.numpy()) if lengths.is_cpu else (starts, lengths)
        return Batch(*told, host, given.block_table_tensor, self._memory)


class PagedImpl(AttentionImpl):
    """Attends over one layer, by a `PagedPast` that it is given when the model is loaded."""

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
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            raise ValueError("xquant: ALiBi and layers that share a cache are not served")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.logits_soft_cap, self.sink_logits = float(scale), logits_soft_cap, sinks
        self.served: PagedPast | None = None
        self.ring: Ring | None = None
        self.angles: Callable[[], Angles] | None = None
        self.moved = 0  # bytes: from where vLLM puts its page in a block to where it is

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        **more: Any,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM tries the model out
            return output.zero_()
        assert self.served is not None and self.ring is not None
        self.served.bind(kv_cache, self.ring.kv_cache, self.ring.retention.capacity, self.moved)
        found: Any = get_forward_context().attn_metadata
        step = found[self.ring.name].step_of(attn_metadata, self.ring.retention, _begun)
        call = AttentionCall(query, key, value, None, self.scale, self.logits_soft_cap, self.sink_logits)
        self.served.attend(call, step, output)
        return output
