from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from xquant.quant import Affine
from xquant.quant.pack import Tile, pack, packed_rows, planes, unpack
from xquant.quant.quantizer import dense

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9))


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(1, 8), SHAPES, st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(bits: int, shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.shape == (shape[0], packed_rows(shape[1], bits), shape[2])
    assert torch.equal(unpack(packed, bits, shape[1]), codes)


def test_bits_take_their_bits() -> None:
    for bits in range(1, 9):
        assert packed_rows(128, bits) == 16 * bits
        assert sum(planes(bits)) == bits


def golden(bits: int, codes: list[int]) -> str:
    return pack(torch.tensor(codes, dtype=torch.uint8)[:, None], bits).numpy().tobytes().hex()


def test_the_packed_format_does_not_change() -> None:
    codes = [0, 1, 2, 3, 4, 5, 6, 7]
    assert golden(1, [c & 1 for c in codes]) == "aa"
    assert golden(2, [c & 3 for c in codes]) == "88dd"
    assert golden(3, codes) == "88ddf0"
    assert golden(4, codes) == "40516273"
    assert golden(8, codes) == "0001020304050607"
    assert golden(3, [7, 0, 5]) == "1305"


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(["tokens", "channels"]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 17),
    st.integers(1, 3),
    st.sampled_from(["token", "channel"]),
)
def test_tiles_change_the_order_and_nothing_else(
    lanes: str, bits: int, heads: int, head: int, blocks: int, per: str
) -> None:
    tile = Tile(8 * head, lanes)
    x = torch.randn(2, 32 * blocks, heads * tile.head)
    rows, tiles = Affine(bits, per, 32), Affine(bits, per, 32, tile=tile)
    plain, tiled = rows.encode(x, None), tiles.encode(x, None)
    # What a plane of the rest is filled up by, and the lanes after the last channel.
    more = {name: tiled[name].nbytes - plain[name].nbytes for name in plain}
    rest = lanes == "tokens" and head % 4 and blocks % 2
    lost = 2 * heads * 32 * (bits & 1) * (head % 2) if rest else 0
    if lanes == "channels" and heads * head % 2:
        lost = 2 * 8 * 4 * blocks * bits
    assert more == {"codes": lost, "scale": 0, "zero": 0}
    one, other = torch.empty_like(x), torch.empty_like(x)
    rows.decode(plain, one)
    tiles.decode(tiled, other)
    assert torch.equal(one, other)


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("per", ["token", "channel"])
def test_a_block_that_is_not_whole_tiles_is_stored_in_rows(per: Any, lanes: Any) -> None:
    x = torch.randn(2, 20, 64)
    rows, tiles = Affine(3, per, 32), Affine(3, per, 32, tile=Tile(32, lanes))
    plain, tiled = rows.encode(x, None), tiles.encode(x, None)
    assert all(torch.equal(dense(plain, name), dense(tiled, name)) for name in plain)
    one, other = torch.empty_like(x), torch.empty_like(x)
    rows.decode(plain, one)
    tiles.decode(tiled, other)
    assert torch.equal(one, other)


def test_the_order_of_tiles_does_not_change() -> None:
    # Element (token, channel) of a block is numbered by its place.
    codes = torch.arange(32 * 64).view(32, 64)
    keys = Tile(32, "tokens").arrange(codes)  # [heads 2, tiles 2, quads 8, 64]
    assert keys.shape == (2, 2, 8, 64)
    head, tile, quad, lane, element = 1, 1, 5, 3, 2
    assert (
        keys[head, tile, quad, lane * 4 + element] == codes[tile * 16 + lane, head * 32 + quad * 4 + element]
    )
    values = Tile(32, "channels").arrange(codes)
    assert (
        values[head, tile, quad, lane * 4 + element]
        == codes[quad * 4 + element, head * 32 + tile * 16 + lane]
    )
