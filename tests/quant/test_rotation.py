import pytest
import torch

from xquant.quant import hadamard


@pytest.mark.parametrize("size", [1, 2, 3, 6, 12, 64, 96, 576])
def test_the_rotation_is_orthogonal_symmetric_and_flat(size: int) -> None:
    matrix = hadamard(size)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert torch.allclose(matrix, matrix.T, atol=1e-6)
    assert matrix.abs().max() <= (2 / size) ** 0.5 * 1.001
