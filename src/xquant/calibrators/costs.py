"""What an error in a token costs, predicted from the token's keys and values.

The squared gradient of a token says what an error in it costs, and is known for a calibration text alone. Its
logarithm is fitted by a linear function of the token's row. Squared gradients vary about their mean like the
squares of normal numbers, so the fit is that of a gamma distribution with a logarithmic link (McCullagh and
Nelder, Generalized Linear Models, 1989, chapter 8), which needs no number to be above 0.
"""

import torch
from torch import Tensor

from ..threads import one_thread

RIDGE = 0.02
"""Times the squared length of the function, in the units in which rows are uncorrelated."""
ROWS_RIDGE = 1e-3
"""Added to the covariance of rows, times the mean of its diagonal."""
STEPS = 60
"""Of the search, at most."""
BIN = 16
"""Positions whose costs are compared with each other: the later a token of a sample, the fewer read it."""


@torch.inference_mode(False)
def direction(rows: Tensor, due: Tensor) -> Tensor:
    """The linear function ``[W]`` of rows ``[N, T, W]``, up to a constant, whose exponential is what is
    ``due`` ``[N, T]``."""
    mean = due.mean(0)
    by_place = torch.cat([part.mean().expand(len(part)) for part in mean.split(BIN)])
    target = (due / by_place.clamp(min=1e-30)).flatten()
    x = rows.flatten(0, 1).double()
    x = x - x.mean(0)
    covariance = x.T @ x / len(x)
    covariance.diagonal().add_(ROWS_RIDGE * covariance.diagonal().mean().clamp(min=1e-30))
    with one_thread(), torch.enable_grad():
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, x.T, upper=False).T.float()
        found = torch.zeros(white.shape[1] + 1, dtype=torch.float32, device="cpu").requires_grad_()
        search = torch.optim.LBFGS([found], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            search.zero_grad()
            logarithm = white @ found[:-1] + found[-1]
            lost = (target * (-logarithm).exp() + logarithm).mean() + RIDGE * found[:-1].square().sum()
            lost.backward()
            return lost

        search.step(loss)
        weights = found.detach()[:-1].double()
        return torch.linalg.solve_triangular(root.T, weights[:, None], upper=True).squeeze(1).float()
