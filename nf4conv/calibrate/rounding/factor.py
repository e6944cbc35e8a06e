"""The order in which inputs are rounded, and the factor that says how later inputs make up for the
errors of earlier ones.

With H⁻¹ = Uᵀ·U, U upper triangular, the best reply to an error of (w - q) in input j is to move
each later input k by -(w - q) · U[j, k] / U[j, j]; what remains costs ((w - q) / U[j, j])².
(Optimal brain surgery, as GPTQ computes it.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.errors import CodecError

DAMPING: Final = 0.01
"""Added to the diagonal, relative to its mean: the sums are known from a sample only."""

_LARGEST_DAMPING: Final = 1e6  # with this the moments are a multiple of the identity

_PIECE: Final = 1024  # rows or columns of a large matrix that are worked on at a time


@dataclass(frozen=True)
class Factor:
    """The second moments of a layer's inputs, in the order of rounding, and their factor.

    Attributes:
        order: [in_features] int64, the input at each place. Groups of `blocksize` inputs, which
            share a scale, stay together.
        moments: [in_features, in_features] float32, mean second moments in this order; inputs that
            were always zero have the mean of the diagonal on theirs.
        upper: [in_features, in_features] float32, U of H⁻¹ = Uᵀ·U for the damped moments H, zeros
            below the diagonal.
        blocksize: the inputs of a group.
        damping: that was needed, relative to the mean of the diagonal.
    """

    order: torch.Tensor
    moments: torch.Tensor
    upper: torch.Tensor
    blocksize: int
    damping: float

    @property
    def groups(self) -> torch.Tensor:
        """The group at each place of the order, [groups] int64."""
        first = self.order[:: self.blocksize]
        return first // self.blocksize


def factor(moments: torch.Tensor, blocksize: int, damping: float = DAMPING) -> Factor:
    """Orders the inputs of a layer, and factors the inverse of their second moments.

    The factorisation is in float64. Where it fails, the damping grows tenfold until it holds.

    `damping` is added to the diagonal, relative to its mean. Moments that are not finite are an
    error.
    """
    diagonal = moments.diagonal()
    # a sum is finite only if every term is, unless it overflows, which must stop us as well
    total = moments.sum(dtype=torch.float64)
    if not bool(total.isfinite()):
        raise CodecError("second moments: not finite; the activations hold NaN or infinity")
    floor = diagonal.double().mean().clamp_min(1e-30)
    order = energy_order(diagonal, blocksize)
    upper, used = _factor_of_inverse(moments, order, floor, damping)
    ordered = in_order(moments, order)
    _give_floor(ordered.diagonal(), floor)
    return Factor(order, ordered, upper, blocksize, used)


def energy_order(diagonal: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Returns the inputs, groups of more energy first, and in a group inputs of more energy first.

    What is rounded first is compensated by all that follow.
    """
    groups = diagonal.view(-1, blocksize)
    energy = groups.sum(dim=1, dtype=torch.float64)
    ranked = energy.argsort(descending=True, stable=True)
    inside = groups.argsort(dim=1, descending=True, stable=True)
    order = ranked[:, None] * blocksize + inside[ranked]
    return order.view(-1)


def in_order(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a square matrix with rows and columns in an order."""
    rows = matrix.index_select(0, order)
    return rows.index_select(1, order)


def _factor_of_inverse(
    moments: torch.Tensor, order: torch.Tensor, floor: torch.Tensor, damping: float
) -> tuple[torch.Tensor, float]:
    """Returns U of (moments + damping · floor · I)⁻¹ = Uᵀ·U, [n, n] float32, and the damping used.

    Read from its last row and column backwards, the matrix has a lower Cholesky factor; read
    backwards again, that is an upper R with R·Rᵀ = H, and U is its inverse. All is computed in the
    place of one float64 matrix, which is the largest tensor of a calibration.
    """
    backwards = order.flip(0)
    while damping <= _LARGEST_DAMPING:
        work = _undamped(moments, backwards, floor)
        diagonal = work.diagonal()
        diagonal.add_(damping * floor)
        lower = work.mT  # torch makes a factor column by column, so it can stand in its place
        failed = torch.zeros((), dtype=torch.int32, device=work.device)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        if not bool(failed):
            _invert_lower(lower)
            return _backwards(lower), damping
        damping = max(damping, 1e-6) * 10
    raise CodecError("second moments: no damping makes them positive definite")


def _undamped(moments: torch.Tensor, order: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Returns moments with rows and columns in an order, float64; dead inputs have the floor."""
    found = torch.empty_like(moments, dtype=torch.float64)
    for rows in _pieces(moments.shape[0]):
        piece = moments.index_select(0, order[rows])
        found[rows] = piece.index_select(1, order)
    _give_floor(found.diagonal(), floor)
    return found


def _give_floor(diagonal: torch.Tensor, floor: torch.Tensor) -> None:
    """Gives inputs that were always zero the floor."""
    diagonal.copy_(diagonal.where(diagonal > 0, floor.float()))


def _invert_lower(lower: torch.Tensor) -> None:
    """Replaces a lower triangular matrix by its inverse.

    Columns are replaced from the last to the first. What stands below a diagonal block D is then
    multiplied by the inverse that stands to the right of it, and by that of D.
    """
    size = lower.shape[0]
    for block in reversed(list(_pieces(size))):
        inside = lower[block, block]
        unit = torch.eye(len(inside), dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(inside, unit, upper=False)
        rest = slice(block.stop, size)
        below = lower[rest, rest] @ lower[rest, block]
        lower[rest, block] = (below @ inverse).neg_()
        lower[block, block] = inverse


def _backwards(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a matrix from its last row and column backwards, float32."""
    size = matrix.shape[0]
    found = torch.empty_like(matrix, dtype=torch.float32, memory_format=torch.contiguous_format)
    for rows in _pieces(size):
        mirrored = matrix[size - rows.stop : size - rows.start]
        found[rows] = mirrored.flip(0, 1)
    return found


def _pieces(size: int) -> Iterator[slice]:
    """Yields rows or columns that are worked on at a time."""
    for start in range(0, size, _PIECE):
        yield slice(start, min(start + _PIECE, size))
