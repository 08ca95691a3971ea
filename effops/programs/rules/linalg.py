"""Operators that take a matrix as a whole: batches of matrices are cut."""

from collections.abc import Callable, Iterator

from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, argument, operands_of, shape_of
from effops.pytorch.operators import aten
from effops.pytorch.prediction import schema_of


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


def solving(number: int, *ranks: int) -> Callable[[Node], Iterator[Binding]]:
    """The rule of an operator that also treats each column of a right-hand side alone, given by its number."""
    of_batches = batched(*ranks)

    def rule(node: Node) -> Iterator[Binding]:
        yield from of_batches(node)
        names = {one.name for one in schema_of(node.target).arguments}
        last, shape = len(shape_of(node)) - 1, shape_of(node)
        if shape[last] != 1 and ("left" not in names or argument(node, "left")):
            yield Binding((Place(number, len(shape_of(operands_of(node)[number])) - 1),), last)

    return rule


def solved(node: Node) -> Iterator[Binding]:
    """The right-hand side may be vectors."""
    matrix, right = map(shape_of, operands_of(node))
    return batched(2, 1 if len(right) == 1 or right == matrix[:-1] else 2)(node)


RULES = {
    aten.linalg_pinv.atol_rtol_tensor: batched(2, 0, 0),
    aten._linalg_solve_ex.default: solved,
    aten.linalg_cholesky_ex.default: batched(),
    aten.linalg_inv_ex.default: batched(),
    aten._linalg_det.default: batched(),
    aten._linalg_slogdet.default: batched(),
    aten._linalg_svd.default: batched(),
    aten._linalg_eigh.default: batched(),
    aten._linalg_eigvals.default: batched(),
    aten.linalg_eigvals.default: batched(),
    aten.linalg_qr.default: batched(),
    aten.linalg_lu.default: batched(),
    aten.linalg_lu_factor_ex.default: batched(),
    aten.linalg_lu_solve.default: solving(2, 2, 1),
    aten.linalg_solve_triangular.default: solving(1),
    aten.linalg_matrix_exp.default: batched(),
    aten.linalg_householder_product.default: batched(2, 1),
    aten.triangular_solve.default: batched(),
    aten.cholesky.default: batched(),
    aten.cholesky_solve.default: solving(0),
    aten.cholesky_inverse.default: batched(),
    aten.lu_unpack.default: batched(2, 1),
    aten.geqrf.default: batched(),
    aten.ormqr.default: batched(2, 1, 2),
}
