"""What an engine is asked for, and what of it is refused before a model is loaded."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.attention import selector

from xquant.models import AttentionView
from xquant.past.angles import Angles
from xquant.saved.shelf import Shelf
from xquant.serve import fit
from xquant.serve.build import Model
from xquant.serve.capacity import left_beside_recent

from . import dtype
from .guard import asked_for, refusing

CONNECTOR = "XQuantConnector"
logger = init_logger("vllm.xquant")  # vLLM shows the loggers below its own


def wanted_of(config: Any) -> fit.Wanted | None:
    """What a configuration asks for; None: nothing."""
    found = dtype.joined(asked_for(config.additional_config), dtype.name_in(config))
    return fit.wanted(found) if found else None


@refusing
def checked(original: Callable[..., Any], args: Any, *more: Any, **options: Any) -> Any:
    """An engine's configuration, with pages of the method's blocks."""
    selector._cached_get_attn_backend.cache_clear()  # of an earlier engine of this process
    wanted = wanted_of(args)
    if wanted is None:
        config = original(*more, **options)
        if getattr(config.kv_transfer_config, "kv_connector", None) == CONNECTOR:
            raise ValueError(f"xquant: {CONNECTOR} needs a method, additional_config xquant=SPEC")
        return config
    args.block_size, args.enforce_eager = wanted.block_of(args.block_size), True
    dtype.prepare(args)
    config = original(*more, **options)
    known = model_of(config)
    codecs = fit.check_model(wanted, known)
    if connector := connector_options_of(config):
        codecs = [*codecs, *fit.check_model(connector.wanted, known, stored=True)]
    if why := _unfit(config, wanted, known):
        raise ValueError(f"xquant: {why} is not served yet")
    _check_angles(config, known, [codec.view for codec in codecs if not codec.rotated])
    if connector:
        _check_folder(connector)
    _warn_of_recent(config, wanted, known)
    return config


def _check_folder(options: fit.ConnectorOptions) -> None:
    """Make it, as the processes that use it will."""
    try:
        Shelf(Path(options.path), options.nbytes)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"xquant: the connector's folder '{options.path}' cannot be used: {why}") from None


def _warn_of_recent(config: VllmConfig, wanted: fit.Wanted, known: Model) -> None:
    if known.has_states:
        return  # how many vLLM keeps is not known yet
    drafts, context = drafts_of(config), config.model_config.max_model_len
    left = left_beside_recent(wanted, known, drafts, context)
    if left < 0.5:
        logger.warning(
            "xquant: tail=%d and %d drafts leave room for %.0f%% of the tokens, in requests of %d, that would"
            " fit without them: recent tokens are kept as they are",
            wanted.method.tail,
            drafts,
            100 * left,
            context,
        )


def drafts_of(config: VllmConfig) -> int:
    """Tokens that are guessed at a time."""
    return int(getattr(config.speculative_config, "num_speculative_tokens", None) or 0)


def connector_options_of(config: VllmConfig) -> fit.ConnectorOptions | None:
    """What this engine's connector is to keep; None where it has none, or another."""
    transfer, wanted = config.kv_transfer_config, wanted_of(config)
    if transfer is None or transfer.kv_connector != CONNECTOR or wanted is None:
        return None
    return fit.connector_options(transfer.kv_connector_extra_config, wanted)


def model_of(config: VllmConfig) -> Model:
    model, shards = config.model_config, config.parallel_config.tensor_parallel_size
    return Model(model.hf_text_config, model.dtype, _folder(model, config.load_config.download_dir), shards)


def _folder(model: Any, downloads: str | None) -> str:
    """Where a checkpoint lies; of one with a name on the hub, where it was downloaded to, if it was."""
    if Path(model.model).is_dir():
        return str(model.model)
    try:
        found = try_to_load_from_cache(model.model, "config.json", downloads, model.revision)
    except HFValidationError:  # it is no such name: an address, perhaps
        return str(model.model)
    return str(Path(found).parent) if isinstance(found, str) else str(model.model)


def _unfit(config: VllmConfig, wanted: fit.Wanted, known: Model) -> str:
    """What of an engine's configuration cannot be served; empty where all can."""
    parallel, scheduler = config.parallel_config, config.scheduler_config
    drafts, store = config.speculative_config, wanted.through_store
    stores = config.kv_transfer_config is not None
    few = scheduler.max_num_batched_tokens < wanted.method.group
    refused = {
        "a device that is no CPU": not current_platform.is_cpu(),
        "a KV cache dtype of its own": _own_dtype(config) != "auto",
        "speculative decoding by a model": drafts is not None and drafts.method != "ngram",
        "xquant_attend=store with speculative decoding": store and drafts is not None,
        "xquant_attend=store with fewer tokens in a step than a block": store and few,
        "xquant_attend=store with states beside attention": store and known.has_states,
        "a sliding window with disable_hybrid_kv_cache_manager": bool(known.windows)
        and scheduler.disable_hybrid_kv_cache_manager,
        f"a KV connector other than {CONNECTOR}": stores and connector_options_of(config) is None,
        f"{CONNECTOR} with windows of unequal size": stores and len(known.windows) > 1,
        f"{CONNECTOR} with windows and states": stores and known.has_states and bool(known.windows),
        f"{CONNECTOR} with states and without prefix caching": stores
        and known.has_states
        and config.cache_config.mamba_cache_mode != "align",
        f"{CONNECTOR} with states and speculative decoding": stores
        and known.has_states
        and drafts is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
    }
    return next((name for name, here in refused.items() if here), "")


def _own_dtype(config: VllmConfig) -> str:
    """Of vLLM's: where ours is named, what the checkpoint would have."""
    given = "auto" if dtype.name_in(config) else config.cache_config.cache_dtype
    return resolve_kv_cache_dtype_string(given, config.model_config)


def _check_angles(config: VllmConfig, known: Model, views: list[AttentionView]) -> None:
    """Ask for the angles of these layers' RoPE."""
    angles, most = functools.cache(rotary_angles), known.config.max_position_embeddings
    with set_current_vllm_config(config):
        for view in views:
            rotary = get_rope(view.head_size, most, True, known.rope(view), known.dtype)
            angles(rotary, view.rotary_size)


def rotary_angles(rotary: Any, size: int) -> Angles:
    plain = getattr(rotary, "is_neox_style", False) and not getattr(rotary, "mrope_section", None)
    # vLLM's own table is in the dtype of the model.
    table = rotary._compute_cos_sin_cache() if plain else None
    if table is None or table.shape != rotary.cos_sin_cache.shape or table.shape[-1] != size:
        raise ValueError(
            f"xquant: keys before {type(rotary).__name__} cannot be had from vLLM: use a method that keeps"
            " keys after RoPE, such as kivi-4bit:rope=post"
        )
    return Angles(*table.chunk(2, -1))
