"""LMCache's second tier with our serde: its own adapter of a folder, in this process."""

import json
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import calibration, rows_held
from support.models import prompt, tiny
from xquant import KVCache

pytest.importorskip("lmcache")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus

from xquant_lmcache import places
from xquant_lmcache.states import APART, BLOCK, BLOCKS, FUSED, Heads, layout_of, rows_of, write_rows

TOKENS, CHUNKS = 256, 2
IDS = prompt(1, TOKENS * CHUNKS)
HEADS = Heads(2, 32)
PLACED = ["tc-2bit", "tc-cl-2bit", "kivi-2bit:sink=2"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=64, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    model.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def chunks(model: Any) -> list[Tensor]:
    """Keys and values ``[2, L, T, G D]`` of each chunk."""
    cache = KVCache(model, "full")
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    parts = torch.stack(rows_held(cache)).chunk(2, -1)
    return [part.clone() for part in torch.stack(parts).split(TOKENS, 2)]


def key_of(number: int) -> ObjectKey:
    return ObjectKey(chunk_hash=bytes([number]) * 32, model_name="tiny", kv_rank=0)


def told() -> Event:
    """What a server says of the chunks before it stores them."""
    starts = [TOKENS * number for number in range(CHUNKS)]
    bound = {
        "chunk_hashes": [key_of(number).chunk_hash for number in range(CHUNKS)],
        "token_offsets": starts,
        "token_chunks": [IDS[0, start : start + TOKENS].tolist() for start in starts],
        "parent_hashes": [None] * CHUNKS,
    }
    return Event(event_type=EventType.MP_TOKENS, session_id="one", metadata=bound)


def described(place: Path, serde: dict[str, Any]) -> dict[str, Any]:
    """A tier as the page describes it, with another folder and serde."""
    page = (Path(__file__).parents[2] / "docs" / "across-machines.md").read_text()
    (block,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    given: dict[str, Any] = json.loads(block)
    return given | {"adapter_params": {"base_path": str(place)}, "serde": given["serde"] | serde}


class Tier:
    """The second tier of a process."""

    def __init__(self, place: Path, **serde: Any) -> None:
        given = described(place, serde)
        (config,) = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(given)])).adapters
        memory = L1MemoryManagerConfig(size_in_bytes=1 << 26, use_lazy=False, shm_name="")
        self.first = L1Manager(L1ManagerConfig(memory_config=memory))
        self.adapter = create_l2_adapter(config)
        if config.serde_config is not None:
            self.serde = create_serde_processor(config.serde_config)
            self.adapter = SerdeL2AdapterWrapper(self.adapter, self.serde, self.first)

    def memory(self, keys: list[ObjectKey], like: Tensor) -> list[Any]:
        """Objects of the first tier that are shaped like these states."""
        layout = MemoryLayoutDesc(shapes=[like.shape], dtypes=[like.dtype])
        found = self.first.reserve_write(keys, [True] * len(keys), layout, tag="test")
        return [found[key][1] for key in keys]

    def store(self, chunks: list[Tensor]) -> bool:
        keys = [key_of(number) for number in range(len(chunks))]
        objects = self.memory(keys, chunks[0])
        for each, states in zip(objects, chunks, strict=True):
            each.tensor.copy_(states)
        task = self.adapter.submit_store_task(keys, objects)
        done = waited(lambda: self.adapter.pop_completed_store_tasks().get(task))
        self.first.finish_write_and_delete(keys, tag="test")
        return bool(done.is_successful())

    def load(self, like: Tensor, count: int = CHUNKS) -> list[Tensor | None]:
        """What is found of the first chunks."""
        keys = [key_of(number) for number in range(count)]
        objects = self.memory(keys, like)
        for each in objects:
            each.tensor.zero_()
        task = self.adapter.submit_load_task(keys, objects)
        found = waited(lambda: self.adapter.query_load_result(task))
        held = [o.tensor.clone() if found.test(i) else None for i, o in enumerate(objects)]
        self.first.finish_write_and_delete(keys, tag="test")
        return held


def waited(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while (found := ask()) is None:
        assert time.monotonic() < end, "LMCache did not answer"
        time.sleep(0.01)
    return found


@contextmanager
def tier(place: Path, **serde: Any) -> Iterator[Tier]:
    made = Tier(place, **serde)
    try:
        yield made
    finally:
        made.adapter.close()


def options(model: Any, folder: Path, spec: str, place: Path) -> dict[str, Any]:
    made, found = calibration(model, spec), {"model": str(folder), "method": spec}
    if made is not None:
        made.save(place / "calibration.safetensors")
        found["calibration"] = str(place / "calibration.safetensors")
    return found


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that says which tokens its chunks have."""

    class Bus:
        def subscribe(self, kind: EventType, callback: Callable[[Event], None]) -> None:
            assert kind == EventType.MP_TOKENS
            callback(told())

    monkeypatch.setattr(places, "get_event_bus", Bus)
    yield


@pytest.mark.parametrize("spec", ["kivi-4bit:rope=post", "int8", *PLACED])
def test_another_process_reads_what_one_stored(
    model: Any, folder: Path, chunks: list[Tensor], tmp_path: Path, published: None, spec: str
) -> None:
    given = options(model, folder, spec, tmp_path)
    with tier(tmp_path / "tier", **given) as one:
        assert one.store(chunks)
    files = list((tmp_path / "tier").rglob("*.data"))
    size = sum(file.stat().st_size for file in files)
    assert len(files) == CHUNKS and size < sum(states.nbytes for states in chunks) / 2
    with tier(tmp_path / "tier", **given) as other:
        found = other.load(chunks[0])
    for states, held in zip(chunks, found, strict=True):
        assert held is not None
        assert (held - states).norm() / states.norm() < (0.02 if spec == "int8" else 0.6)


@pytest.mark.parametrize("spec", PLACED)
def test_the_first_chunk_of_a_server_is_stored(
    model: Any, folder: Path, chunks: list[Tensor], tmp_path: Path, spec: str
) -> None:
    """A server publishes nothing that nobody listens to."""
    bus = init_event_bus(EventBusConfig(enabled=True))
    bus.start()
    try:
        with tier(tmp_path / "tier", **options(model, folder, spec, tmp_path)) as one:
            assert bus.has_subscribers(EventType.MP_TOKENS)
            bus.publish(told())
            assert one.store(chunks)
    finally:
        bus.stop()
        init_event_bus(EventBusConfig(enabled=False))


@pytest.mark.parametrize("spec", PLACED)
def test_a_place_that_was_not_told_is_a_miss(
    model: Any, folder: Path, chunks: list[Tensor], tmp_path: Path, monkeypatch: Any, spec: str
) -> None:
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    with tier(tmp_path / "tier", **options(model, folder, spec, tmp_path)) as one:
        assert not one.store(chunks)
        assert one.load(chunks[0]) == [None, None]
    assert not list((tmp_path / "tier").rglob("*.data"))


def test_what_is_altered_or_of_another_is_a_miss(
    model: Any, folder: Path, chunks: list[Tensor], tmp_path: Path
) -> None:
    given = options(model, folder, "kivi-4bit:rope=post", tmp_path)
    with tier(tmp_path / "tier", **given) as one:
        assert one.store(chunks)
        (first, *_) = (tmp_path / "tier").rglob("*.data")
        content = first.read_bytes()
        first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert one.load(chunks[0]) == [None, None]
        first.write_bytes(content)
        assert all(held is not None for held in one.load(chunks[0]))
    other = tiny("llama", head_dim=32, hidden_size=64, max_position_embeddings=1024)
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with tier(tmp_path / "tier", **{**given, "model": str(tmp_path / "other")}) as another:
        assert another.load(chunks[0]) == [None, None]
    with tier(tmp_path / "tier", **given) as shorter:
        assert shorter.load(chunks[0][:, :, :128], 1) == [None]


def test_options_that_are_none_are_refused_by_one_line(model: Any, folder: Path, tmp_path: Path) -> None:
    right = options(model, folder, "kivi-4bit:rope=post", tmp_path)
    for change, why in (
        ({"method": "kivi-4bitt"}, "kivi-4bitt"),
        ({"metod": "kivi-4bit"}, "no option 'metod'"),
        ({"layout": "odd"}, "'layout' is one of"),
        ({"model": None}, "needs the 'model'"),
        ({"method": "tc-2bit"}, "xquant_calibration"),
    ):
        with pytest.raises(ValueError, match=why) as refused:
            Tier(tmp_path / "tier", **{**right, **change})
        assert str(refused.value).startswith("xquant: ") and "\n" not in str(refused.value)


def test_a_chunk_that_is_no_whole_blocks_is_not_stored(
    model: Any, folder: Path, chunks: list[Tensor], tmp_path: Path
) -> None:
    with tier(tmp_path / "tier", **options(model, folder, "kivi-4bit:rope=post", tmp_path)) as one:
        odd = [states[:, :, :200].clone() for states in chunks]
        with pytest.raises(ValueError, match="are no whole blocks"):
            one.store(odd)


@pytest.mark.parametrize("layout", [APART, FUSED, BLOCKS])
def test_states_come_back_in_every_layout(layout: str) -> None:
    width = HEADS.kv_heads * HEADS.head_size
    shape = (2, 3, TOKENS, width) if layout == APART else (1, 3, TOKENS, 2 * width)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout != FUSED:  # which is taken where torch has CUDA
        assert layout_of(states.shape) == layout
    rows = rows_of(states, layout, HEADS)
    assert rows.shape == (3, TOKENS, 2 * width)
    if layout == FUSED:
        assert torch.equal(rows[1, 7, :32], states[0, 1, 7, :32])
        assert torch.equal(rows[1, 7, width : width + 32], states[0, 1, 7, 32:64])
    if layout == BLOCKS:  # the second block of layer 1, head 1: token 5 of it
        memory = states[0, 1, 128:].view(128, HEADS.kv_heads, 64)[:, 1].flatten()
        assert torch.equal(rows[1, 133, 32:64], memory[: 32 * 128].view(32, 128)[:, 5])
        assert torch.equal(rows[1, 133, width + 32 :], memory[32 * 128 :].view(128, 32)[5])
    other = torch.zeros(shape)
    write_rows(rows, other, layout, HEADS)
    assert torch.equal(other, states)
    for wrong in (Heads(3, 32), Heads(2, 16)):
        with pytest.raises(ValueError, match="are not '"):
            rows_of(states, layout, wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 64, 80])
def test_what_an_engine_writes_is_read(dtype: torch.dtype, head_size: int) -> None:
    """vLLM's own function writes states to its pages; LMCache takes their rows token by token."""
    engine = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16:
        pytest.skip("refused")
    heads = Heads(2, head_size)
    keys, values = torch.randn(2, TOKENS, *heads, generator=torch.Generator().manual_seed(0)).to(dtype)
    pages = torch.zeros(TOKENS // BLOCK, heads.kv_heads, BLOCK, 2 * head_size, dtype=dtype)
    to_keys, to_values = pages.view(*pages.shape[:2], 2, BLOCK, head_size).unbind(2)
    isa = engine._get_attn_isa(dtype, BLOCK, head_size)
    engine.ops.cpu_attn_reshape_and_cache(keys, values, to_keys, to_values, torch.arange(TOKENS), isa)
    states = pages.transpose(1, 2).reshape(1, 1, TOKENS, -1)
    wanted = torch.cat([keys.flatten(1), values.flatten(1)], -1)
    assert torch.equal(rows_of(states, BLOCKS, heads)[0], wanted)
