"""Operators that take a matrix as a whole: batches of matrices are cut."""

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, operands_of, shape_of

aten = torch.ops.aten


def batched(*ranks: int) -> Callable[[Node], Iterator[Binding]]:
    """The rule of operands that end in a matrix each, or in as many axes as `ranks` has. Axes before them broadcast."""

    def rule(node: Node) -> Iterator[Binding]:
        shapes = [shape_of(one) for one in operands_of(node)]
        ends = [*ranks, *[2] * (len(shapes) - len(ranks))]
        batches = [shape[: max(0, len(shape) - end)] for shape, end in zip(shapes, ends)]
        rank = max(map(len, batches))
        for axis in range(rank):
            own = [(number, axis - rank + len(batch), batch) for number, batch in enumerate(batches)]
            places = [Place(number, at) for number, at, batch in own if at >= 0 and batch[at] != 1]
            if places:
                yield Binding(tuple(places), axis)

    return rule


RULES = {
    aten.linalg_cholesky_ex.default: batched(),
    aten.linalg_inv_ex.default: batched(),
    aten._linalg_det.default: batched(),
    aten._linalg_slogdet.default: batched(),
    aten._linalg_svd.default: batched(),
    aten._linalg_eigh.default: batched(),
    aten._linalg_eigvals.default: batched(),
    aten.linalg_eig.default: batched(),
    aten.linalg_eigvals.default: batched(),
    aten.linalg_qr.default: batched(),
    aten.linalg_lu.default: batched(),
    aten.linalg_lu_factor_ex.default: batched(),
    aten.linalg_lu_solve.default: batched(2, 1),
    aten.linalg_ldl_factor_ex.default: batched(),
    aten.linalg_ldl_solve.default: batched(2, 1),
    aten.linalg_solve_triangular.default: batched(),
    aten.linalg_matrix_exp.default: batched(),
    aten.linalg_householder_product.default: batched(2, 1),
    aten.triangular_solve.default: batched(),
    aten.cholesky.default: batched(),
    aten.cholesky_solve.default: batched(),
    aten.cholesky_inverse.default: batched(),
    aten.lu_unpack.default: batched(2, 1),
    aten.geqrf.default: batched(),
    aten.ormqr.default: batched(2, 1, 2),
}
