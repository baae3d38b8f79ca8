import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xquant.quant.pack import pack, packed_rows, planes, unpack

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9))


@settings(max_examples=120, deadline=None)
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
