"""OSCAR: what is clipped, and the matrix that heads are rotated by."""

import pytest
import torch

from support.caches import calibration, make_cache
from support.models import prompt, tiny
from xquant import attach, parse_method
from xquant.methods.oscar import OscarCodec, bit_reversed, clipped, spread
from xquant.methods.rotated import range_channels
from xquant.quant import Affine, hadamard


def test_what_is_beyond_a_share_of_the_magnitudes_is_clipped() -> None:
    head = torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -80, 9, -10])
    assert clipped(head, 0.7).tolist() == [1, -2, 3, -4, 5, -6, 7, -9, 9, -9]
    assert torch.equal(clipped(head, 1), head)
    both = torch.stack([head, 100 * head])
    assert torch.equal(clipped(both, 0.7)[1], 100 * clipped(head, 0.7)), "each head by itself"


def test_bits_are_read_backwards() -> None:
    assert bit_reversed(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversed(6).tolist() == [0, 4, 2, 1, 5, 3]
    assert bit_reversed(1).tolist() == [0]


@pytest.mark.parametrize("size", [8, 12, 64])
def test_heads_are_turned_to_eigenvectors_mixed_and_put_in_order(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, size, generator=generator, dtype=torch.float64)
    x *= torch.logspace(0, 2, size)
    matrix = spread(x.T @ x).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-5)
    # The largest eigenvalue's place is the first, the next one's that of the bits of 1 read backwards.
    ascending = matrix[bit_reversed(size)].flip(0)
    mixed = torch.empty_like(matrix)
    values, vectors = torch.linalg.eigh(x.T @ x)
    mixed = (vectors @ hadamard(size).double()).T
    assert bool(values.diff().min() >= 0)
    torch.testing.assert_close(ascending, mixed, rtol=0, atol=1e-4)


def test_every_head_has_its_own_matrix_or_shares_that_of_the_layer() -> None:
    model = tiny("llama")
    for spec, dims in (("oscar-2bit", 3), ("oscar-2bit:matrix=layer", 2)):
        found = calibration(model, spec)
        (codec, *_) = parse_method(spec).codecs(attach(model).view.compressed, found)
        assert isinstance(codec, OscarCodec)
        assert codec.key_rotation is not None and codec.key_rotation.dim() == dims
        rows = torch.randn(2, 3, 8, codec.width)
        unclipped = parse_method(f"{spec},key_clip=1,value_clip=1".replace("bit,", "bit:"))
        (exact, *_) = unclipped.codecs(attach(model).view.compressed, found)
        back = torch.cat(exact.rebuild(exact.encode(rows, None).flatten(1, 2)), -1)
        torch.testing.assert_close(back, rows.flatten(1, 2), rtol=1e-4, atol=1e-4)
        alone = codec.encode(rows[:1, 1:2], None)
        assert torch.equal(codec.encode(rows, None)[:1, 1:2], alone)


def test_large_heads_have_ranges_of_equal_parts() -> None:
    sizes = {64: 64, 128: 128, 192: 96, 256: 128, 80: 80, 131: 131}
    assert {size: range_channels(size) for size in sizes} == sizes
    model = tiny("llama", head_dim=256)
    (codec, *_) = parse_method("oscar-2bit").codecs(
        attach(model).view.compressed, calibration(model, "oscar-2bit")
    )
    quantizer = codec.segments[0].quantizer
    assert isinstance(quantizer, Affine) and quantizer.range_size(2 * 256) == 128


def test_one_calibration_serves_any_bits_sinks_and_tail() -> None:
    assert parse_method("oscar-4bit:sink=4,tail=0,group=64,key_clip=1").calibrated_as == "oscar-2bit"
    other = parse_method("oscar-3bit:matrix=layer,first_layers=2")
    assert other.calibrated_as == "oscar-2bit:matrix=layer"


def test_bits_are_those_of_the_paper() -> None:
    model = tiny("llama", head_dim=128)
    cache = make_cache(model, "oscar-2bit:sink=0,tail=0")
    with torch.inference_mode():
        model(prompt(1, 128), past_key_values=cache)
    assert cache.report().bits_per_value == 2.25


def test_the_first_and_the_newest_tokens_stay_full() -> None:
    model = tiny("llama")
    cache = make_cache(model, "oscar-2bit:group=32")
    with torch.inference_mode():
        model(prompt(1, 400), past_key_values=cache)
    method = cache.method
    assert (method.sink, method.tail) == (64, 256)
    report = cache.report()
    width = 2 * model.config.num_key_value_heads * model.config.head_dim
    assert report.tail_bytes == 5 * (400 - 128) * width * 4
