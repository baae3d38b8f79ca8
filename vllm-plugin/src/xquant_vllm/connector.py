"""A connector of vLLM that keeps blocks of prompts in a folder, for other processes and machines.

vLLM makes it twice. In the scheduler it finds out which blocks of a request are in the folder, and says in
each step which pages to fill from there and which to store. In the worker it does so.
"""

from collections.abc import Sequence
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from xquant.saved.shelf import Shelf
from xquant.serve import fit
from xquant.serve.recode import Blocks, Recoder, Stored

from . import states
from .checkpoints import Checkpoints, spec_of
from .checks import connector_options_of, model_of
from .identity import Adapters, of_engine
from .metrics import Counts, Metrics
from .seam import PagedImpl
from .work import Found, Load, Part, Running, Save, Work


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
        self._group = _of_pages(kv_cache_config)
        self._checkpoints = Checkpoints(kv_cache_config, options, self._block)
        self._shards = vllm_config.parallel_config.tensor_parallel_size
        self._sequences: dict[str, Running] = {}
        self._work, self._found = Work(), Found()
        self._counts, self._damaged = Counts(), 0
        self._recoder: Recoder | None = None
        self._failed: set[int] = set()
        if self._checkpoints.of_states:
            states.count_loaded()
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
        self._sequences[request.request_id] = Running(request, root)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        first, most = num_computed_tokens // self._block, (request.num_tokens - 1) // self._block
        sequence, found = self._sequences[request.request_id], self._found
        if (found.request, found.first) != (request.request_id, first):
            found = self._found = self._find(sequence, first, most)
            if not sequence.looked_for:  # a request that waits may be asked for again
                self._counts.add("blocks_missed", most - first - len(found.stored))
            sequence.looked_for = True
        return len(found.stored) * self._block, False

    def _find(self, sequence: Running, first: int, most: int) -> Found:
        """What a sequence can go on from, of its blocks ``first`` to ``most``."""
        request, names = sequence.request.request_id, sequence.names(first, most)
        stored: list[list[Stored]] | None = None
        for place in range(first + self._there(names), first, -1):
            if stored is not None and len(stored) < place - first:  # one before it is damaged
                continue
            start = max(first, self._checkpoints.first(place))
            needed = sequence.names(start, place, self._checkpoints.kind)
            if self._there(needed) < len(needed):
                continue
            parts = self._read(needed)
            if len(parts) < len(needed):
                continue
            if stored is None:  # blocks behind a checkpoint are of no use, and not read
                stored = self._read(names[: place - first])
            if len(stored) >= place - first:
                return Found(request, first, stored[: place - first], parts)
        return Found(request, first)

    def _there(self, names: Sequence[str]) -> int:
        """How many of these blocks, from the first on, the folder has all shards of, whole or not."""
        lacking = (
            place
            for place, name in enumerate(names)
            for rank in range(self._shards)
            if _file(name, rank) not in self._shelf
        )
        return next(lacking, len(names))

    def _read(self, names: Sequence[str]) -> list[list[Stored]]:
        """The first of these blocks, as far as the folder has all shards of them, whole."""
        read: list[list[Stored]] = []
        for name in names:
            shards = [self._shelf.get(_file(name, rank)) for rank in range(self._shards)]
            whole = [shard for shard in shards if shard is not None]
            if len(whole) < self._shards:
                break
            read.append(whole)
        return read

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        count = num_external_tokens // self._block
        if not count:
            return
        found, self._found = self._found, Found()
        assert found.request == request.request_id  # vLLM gives pages to whom it asked for last
        assert count == len(found.stored)
        sequence, first = self._sequences[request.request_id], found.first
        stop, pages = first + count, blocks.get_block_ids()
        names, ids = sequence.names(first, stop), self._ids(request, first, stop)
        starts = [self._block * place for place in range(first, stop)]
        parts = self._parts(sequence, range(stop - len(found.parts), stop), pages)
        for part, stored in zip(parts, found.parts, strict=True):
            part.stored = stored
            if self._checkpoints.of_states:
                part.begins = [pages[group][-1] for group in self._checkpoints.groups]
        self._work.loads.append(Load(names, found.stored, pages[self._group][first:stop], starts, ids, parts))
        for rank in range(self._shards):
            self._shelf.touch([_file(name, rank) for name in [*names, *(part.name for part in parts)]])
        sequence.saved = stop

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        new, old = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in new}
        for each in new:
            self._sequences[each.req_id].pages = [list(pages) for pages in each.block_ids]
        again = zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True)
        for name, blocks, count in again:
            sequence, computed[name] = self._sequences[name], count
            if name in old.resumed_req_ids:
                sequence.pages, sequence.saved = [[] for _ in sequence.pages], 0
            for pages, more in zip(sequence.pages, blocks or (), strict=blocks is not None):
                pages += more
        for name, count in scheduler_output.num_scheduled_tokens.items():
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            self._save(self._sequences[name], computed[name], computed[name] + count - drafts)
        work, self._work = self._work, Work()
        return work

    def _save(self, sequence: Running, begun: int, tokens: int) -> None:
        """Have the blocks stored that a sequence of so many tokens has, where their hashes are known.

        Args:
            begun: tokens that it had before this step.
        """
        own, request = sequence.pages[self._group], sequence.request
        whole = min(tokens // self._block, len(sequence.hashes), len(own))
        if whole > sequence.saved:
            due = self._checkpoints.due(sequence.saved, whole, request.num_prompt_tokens, begun, tokens)
            parts = self._parts(sequence, due, sequence.pages)
            ids = self._ids(request, 0, whole)
            self._work.saves.append(Save(sequence.names(0, whole), own[:whole], ids, parts))
            sequence.saved = whole

    def _parts(self, sequence: Running, places: Sequence[int], pages: Sequence[Sequence[int]]) -> list[Part]:
        """What layers with windows or states have of these blocks, in these pages of all groups."""
        kind, groups = self._checkpoints.kind, self._checkpoints.groups
        names = [sequence.names(place, place + 1, kind)[0] for place in places]
        each = [[pages[group][place] for group in groups] for place in places]
        return [Part(*part) for part in zip(names, each, strict=True)]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._sequences.pop(request.request_id, None)
        if self._found.request == request.request_id:
            self._found = Found()
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
            blocks, parts = [each[rank] for each in load.stored], [part.stored[rank] for part in load.parts]
            worker = self._worker
            known = [worker.fits(*each) for each in zip(blocks, load.starts, strict=True)]
            known += [self._checkpoints.fits(self._modules, part) for part in parts]
            names = [*load.names, *(part.name for part in load.parts)]
            if not all(known):
                for name in (name for name, fits in zip(names, known, strict=True) if not fits):
                    self._shelf.discard(_file(name, rank), "it holds something else than the method stores")
                self._failed |= set(load.pages)
                continue
            with self._counts.timing("unpack_seconds"):
                self._fill(blocks, load)
                for part, stored in zip(load.parts, parts, strict=True):
                    for pages in filter(None, (part.pages, part.begins)):
                        self._checkpoints.unpack(self._modules, pages, stored)
            self._counts.add("blocks_loaded", len(names))
            self._counts.add("bytes_loaded", sum(map(_nbytes, [*blocks, *parts])))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks are loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        """Blocks are stored after the last layer, which may be predicted from those below."""

    def wait_for_save(self) -> None:
        for save in self._given().saves:
            rank = get_tensor_model_parallel_rank()
            names = [_file(name, rank) for name in [*save.names, *(part.name for part in save.parts)]]
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
            self._counts.set_room(self._shelf.room)

    def _given(self) -> Work:
        found = self._get_connector_metadata()
        assert isinstance(found, Work)
        return found

    def _packed(self, save: Save, places: Sequence[int]) -> list[Stored]:
        """What is stored of the blocks at these places of a sequence; behind them are its parts."""
        blocks = [place for place in places if place < len(save.pages)]
        parts = [save.parts[place - len(save.pages)] for place in places[len(blocks) :]]
        packed = [self._checkpoints.pack(self._modules, part.pages) for part in parts]
        if blocks:
            pages = [save.pages[place] for place in blocks]
            starts = [self._block * place for place in blocks]
            ids = torch.tensor(save.ids, device="cpu").view(-1, self._block)[blocks]
            packed = self._worker.pack(self._at(pages, starts, ids, written=True)) + packed
        return packed

    def _fill(self, stored: Sequence[Stored], load: Load) -> None:
        """Write what was found of the blocks of a load to its pages."""
        ids = torch.tensor(load.ids, device="cpu").view(-1, self._block)
        self._worker.unpack(stored, self._at(load.pages, load.starts, ids, written=False))

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
    def _modules(self) -> dict[str, Any]:
        """vLLM's layers, and rings, by name."""
        return self._config.compilation_config.static_forward_context

    @property
    def _impls(self) -> list[Any]:
        """Of the layers with pages, bottom up, bound to vLLM's memory."""
        held = [m for m in self._modules.values() if isinstance(getattr(m, "impl", None), PagedImpl)]
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


def _of_pages(config: KVCacheConfig) -> int:
    """Which of vLLM's groups of layers has our pages."""
    own = (isinstance(spec_of(group), FullAttentionSpec) for group in config.kv_cache_groups)
    return next(place for place, found in enumerate(own) if found)


def _file(name: str, rank: int) -> str:
    """The file of a block that a shard of the heads has."""
    return f"{name}-{rank}"


def _nbytes(stored: Stored) -> int:
    return sum(part.nbytes for part in stored.values())
