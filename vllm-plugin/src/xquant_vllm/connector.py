"""A connector of vLLM that keeps blocks of prompts in a folder, for other processes and machines.

vLLM makes it twice. In the scheduler it finds out which blocks of a request are in the folder, and says in
each step which pages to fill from there and which to store. In the worker it does so.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from xquant.saved.shelf import Shelf
from xquant.serve import fit
from xquant.serve.recode import Blocks, Recoder, Stored

from .checks import connector_options_of, model_of
from .identity import Adapters, of_engine
from .metrics import Counts, Metrics
from .seam import RING, PagedImpl


@dataclass
class Load:
    """Blocks to be written to pages: of each its name, what was read of every shard, the position that it
    starts at, and the ids of all its tokens."""

    names: list[str]
    stored: list[list[Stored]]
    pages: list[int]
    starts: list[int]
    ids: list[int]


@dataclass
class Save:
    """The blocks of a sequence, from the first on: their names, the pages in which they are, and the ids of
    all tokens of them."""

    names: list[str]
    pages: list[int]
    ids: list[int]


@dataclass
class Work(KVConnectorMetadata):
    """What the worker is to do in a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class _Sequence:
    """A request that the scheduler runs."""

    request: Any
    root: bytes | None
    """What its blocks have in common with others that can be read in their place: the engine, and its
    adapter. None: that cannot be told, and it is neither found nor stored."""
    pages: list[int] = field(default_factory=list)
    saved: int = 0
    """Its blocks that are stored, or were loaded."""
    looked_for: bool = False
    """Whether its blocks were looked for in the folder."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """vLLM's, of all tokens before the end of each block."""
        return [] if self.root is None else self.request.block_hashes

    def names(self, first: int, stop: int) -> list[str]:
        """Of its blocks."""
        root = self.root or b""
        return [hashlib.sha256(root + bytes(each)).hexdigest() for each in self.hashes[first:stop]]


@dataclass
class _Found:
    """What was read of the folder for a request, until it has pages. vLLM 0.32 ends the engine where a block
    that was found is not loaded, if layers have more than one kind of cache, as pages and rings are. So what
    is found is held."""

    request: str = ""
    first: int = 0
    """The first of these blocks."""
    stored: list[list[Stored]] = field(default_factory=list)
    """Of each block, by shard."""


class XQuantConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores whole blocks, packed by a method of its own, and loads them where a prompt begins as another
    did.

    ``kv_connector_extra_config``: see `fit.ConnectorOptions`.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        options = connector_options_of(vllm_config)
        assert options is not None  # checked when the engine was configured
        self._options, self._block = options, options.method.group
        self._shelf = Shelf(Path(options.path), options.nbytes)
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self._group = next(i for i, each in groups if not each.layer_names[0].endswith(RING))
        self._shards = vllm_config.parallel_config.tensor_parallel_size
        self._sequences: dict[str, _Sequence] = {}
        self._work, self._found = Work(), _Found()
        self._counts, self._damaged = Counts(), 0
        self._recoder: Recoder | None = None
        self._failed: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._root, self._adapters = of_engine(vllm_config, options), Adapters()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what was not stored is computed again

    # -- what is counted, in both ---------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Counts | None:
        self._counts.add("blocks_damaged", self._shelf.damaged - self._damaged)
        self._damaged = self._shelf.damaged
        return self._counts.taken()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> Metrics:
        return Metrics(*given)

    # -- in the scheduler --------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        adapter = self._adapters.digest(request.lora_request)
        root = None if adapter is None else self._root + adapter
        self._sequences[request.request_id] = _Sequence(request, root)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        first, most = num_computed_tokens // self._block, (request.num_tokens - 1) // self._block
        sequence, found = self._sequences[request.request_id], self._found
        if (found.request, found.first) != (request.request_id, first):
            names = sequence.names(first, most)
            found = self._found = _Found(request.request_id, first, self._read(names))
            if not sequence.looked_for:  # a request that waits may be asked for again
                self._counts.add("blocks_missed", len(names) - len(found.stored))
            sequence.looked_for = True
        return len(found.stored) * self._block, False

    def _read(self, names: Sequence[str]) -> list[list[Stored]]:
        """The first of these blocks, as far as the folder has all shards of them, whole."""
        read: list[list[Stored]] = []
        for name in names:
            parts = [self._shelf.get(_part(name, rank)) for rank in range(self._shards)]
            whole = [part for part in parts if part is not None]
            if len(whole) < self._shards:
                break
            read.append(whole)
        return read

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        count = num_external_tokens // self._block
        if not count:
            return
        found, self._found = self._found, _Found()
        assert found.request == request.request_id  # vLLM gives pages to whom it asked for last
        sequence, first = self._sequences[request.request_id], found.first
        names = sequence.names(first, first + count)
        pages = blocks.get_block_ids()[self._group][first : first + count]
        starts = [self._block * place for place in range(first, first + count)]
        ids = self._ids(request, first, first + count)
        self._work.loads.append(Load(names, found.stored[:count], pages, starts, ids))
        for rank in range(self._shards):
            self._shelf.touch([_part(name, rank) for name in names])
        sequence.saved = first + count

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        new, old = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in new}
        for each in new:
            self._sequences[each.req_id].pages = list(each.block_ids[self._group])
        again = zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True)
        for name, blocks, count in again:
            sequence, computed[name] = self._sequences[name], count
            if name in old.resumed_req_ids:
                sequence.pages, sequence.saved = [], 0
            sequence.pages += [] if blocks is None else blocks[self._group]
        for name, count in scheduler_output.num_scheduled_tokens.items():
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            self._save(self._sequences[name], computed[name] + count - drafts)
        work, self._work = self._work, Work()
        return work

    def _save(self, sequence: _Sequence, tokens: int) -> None:
        """Have the blocks stored that a sequence of so many tokens has, where their hashes are known."""
        whole = min(tokens // self._block, len(sequence.hashes), len(sequence.pages))
        if whole > sequence.saved:
            names = sequence.names(0, whole)
            ids = self._ids(sequence.request, 0, whole)
            self._work.saves.append(Save(names, sequence.pages[:whole], ids))
            sequence.saved = whole

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._sequences.pop(request.request_id, None)
        if self._found.request == request.request_id:
            self._found = _Found()
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def _ids(self, request: Any, first: int, stop: int) -> list[int]:
        """Of all tokens of blocks of a request."""
        return list(request.all_token_ids[first * self._block : stop * self._block])

    # -- in the worker ----------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        rank = get_tensor_model_parallel_rank()
        for load in self._given().loads:
            found: list[Stored] = []
            for name, parts, start in zip(load.names, load.stored, load.starts, strict=True):
                if not self._worker.fits(parts[rank], start):
                    self._shelf.discard(_part(name, rank), "it holds something else than the method stores")
                    break
                found.append(parts[rank])
            with self._counts.timing("unpack_seconds"):
                self._fill(found, load)
            self._counts.add("blocks_loaded", len(found))
            self._counts.add("bytes_loaded", sum(map(_nbytes, found)))
            self._failed |= set(load.pages[len(found) :])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks are loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        """Blocks are stored after the last layer, which may be predicted from those below."""

    def wait_for_save(self) -> None:
        for save in self._given().saves:
            names = [_part(name, get_tensor_model_parallel_rank()) for name in save.names]
            missing = [i for i, name in enumerate(names) if name not in self._shelf]
            with self._counts.timing("pack_seconds"):
                made = dict(zip(missing, self._packed(save, missing), strict=True))

            def make(place: int, made: dict[int, Stored] = made, save: Save = save) -> Stored:
                # Another process may have dropped a block since.
                return made[place] if place in made else self._packed(save, [place])[0]

            there = self._shelf.put(names, make)
            new = [stored for place, stored in made.items() if place < there]
            self._counts.add("blocks_stored", len(new))
            self._counts.add("blocks_left_out", len(made) - len(new))
            self._counts.add("bytes_stored", sum(map(_nbytes, new)))

    def _given(self) -> Work:
        found = self._get_connector_metadata()
        assert isinstance(found, Work)
        return found

    def _packed(self, save: Save, places: Sequence[int]) -> list[Stored]:
        """What is stored of the blocks at these places of a sequence."""
        if not places:
            return []
        pages = [save.pages[place] for place in places]
        starts = [self._block * place for place in places]
        ids = torch.tensor(save.ids, device="cpu").view(-1, self._block)[[*places]]
        return self._worker.pack(self._at(pages, starts, ids, written=True))

    def _fill(self, stored: Sequence[Stored], load: Load) -> None:
        """Write what was found of the first blocks of a load to its pages."""
        if count := len(stored):
            pages, starts = load.pages[:count], load.starts[:count]
            ids = torch.tensor(load.ids, device="cpu").view(-1, self._block)[:count]
            self._worker.unpack(stored, self._at(pages, starts, ids, written=False))

    def _at(
        self,
        pages: Sequence[int],
        starts: Sequence[int],
        ids: torch.Tensor,
        written: bool,
    ) -> Blocks:
        """Blocks with the slots of the sinks of those that start a sequence; ``written``: whether they have
        theirs."""
        slots, found = self._slots, None
        if slots is not None:
            numbers = (
                [slots.of(page) for page, start in zip(pages, starts, strict=True) if not start]
                if written
                else slots.write(pages, starts)
            )
            found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return Blocks(torch.tensor(pages, device="cpu"), torch.tensor(starts, device="cpu"), found, ids)

    @property
    def _impls(self) -> list[Any]:
        """Of the layers with pages, bottom up, bound to vLLM's memory."""
        modules = self._config.compilation_config.static_forward_context.values()
        held = [m for m in modules if isinstance(getattr(m, "impl", None), PagedImpl)]
        for module in held:
            ring = module.impl.ring
            module.impl.served.bind(
                module.kv_cache, ring.kv_cache, ring.retention.capacity, module.impl.moved
            )
        return sorted((m.impl for m in held), key=lambda impl: impl.served.codec.view.index)

    @property
    def _slots(self) -> Any:
        return self._impls[0].ring.retention.slots

    @property
    def _worker(self) -> Recoder:
        impls = self._impls
        if self._recoder is None:
            layers = [impl.served for impl in impls]
            views = [layer.codec.view for layer in layers]
            rank, options = get_tensor_model_parallel_rank(), self._options
            codecs, angles = None, [None] * len(layers)
            if not options.as_served:
                model = model_of(self._config)
                codecs = fit.codecs_for(options.wanted, model, views, rank, stored=True)
                pairs = zip(codecs, impls, strict=True)
                angles = [None if codec.rotated else impl.angles() for codec, impl in pairs]
            self._recoder = Recoder(layers, options.method, codecs, angles)
        return self._recoder


def _part(name: str, rank: int) -> str:
    """The file of a block that a shard of the heads has."""
    return f"{name}-{rank}"


def _nbytes(stored: Stored) -> int:
    return sum(part.nbytes for part in stored.values())
