"""What TorchInductor allocates for the compiled forms of ops, as measured with torch 2.13.

It fuses all but matrix products and normalisers. A matrix product takes copies of operands that are not in the dtype of
the arithmetic.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from effops.numerics.shapes import broadcast_shapes
from effops.prediction.allocations import Bytes


class Program(NamedTuple):
    """A compiled program: how many results it makes in `dtype`, by arithmetic in another, and whether it is trained."""

    results: int
    dtype: torch.dtype
    arithmetic: torch.dtype
    trained: bool

    @property
    def output(self) -> int:
        """Bytes of the results."""
        return self.dtype.itemsize * self.results

    @property
    def unrounded(self) -> int:
        """Bytes of the results in the dtype of the arithmetic, if that is not their own."""
        return self.arithmetic.itemsize * self.results if self.dtype != self.arithmetic else 0

    def copies(self, *tensors: Tensor) -> int:
        """Bytes of copies of tensors in the dtype of the arithmetic; those in that dtype are not copied."""
        return self.arithmetic.itemsize * sum(tensor.numel() for tensor in tensors if tensor.dtype != self.arithmetic)


def dot_products(program: Program, *operands: Tensor, is_product: bool) -> Bytes:
    """The dot products of all pairs, by a matrix product or fused."""
    output, unrounded, copies = program.output, program.unrounded, program.copies(*operands) * is_product
    if program.trained:
        return Bytes(output, copies, unrounded)
    return Bytes(output, 0, copies + max(unrounded - output, 0))


def mapped_dot_products(
    program: Program,
    *operands: Tensor,
    pairs: int,
    scales: int,
    bytes_per_scale: int,
    is_product: bool,
    masked: bool,
    reduced: bool,
) -> Bytes:
    """A function of the dot products of all pairs, with a normaliser of each of the `scales`; or their logsumexp.

    The normaliser takes `bytes_per_scale` while it is computed, after the product. The function is `masked`
    where dot products may lie outside its domain.
    """
    size, output, copies = program.arithmetic.itemsize, program.output, program.copies(*operands)
    values, statistics = size * pairs, 3 * size * program.results * reduced
    if program.trained:
        saved, temporary = values + 8 * scales * (size == 4), (8 + 8 * reduced) * scales * is_product
        if masked:  # in float64 with two masks, which are computed again in float32
            saved, temporary = values + 2 * pairs * (size == 8) + (17 + size % 8) * scales, temporary + values * reduced
        keeps_copies = is_product or operands[0].numel() != operands[1].numel()
        return Bytes(output, saved + copies * keeps_copies + statistics, temporary)
    held = values * (is_product or reduced)  # a product is overwritten with the result, if that is in its dtype
    besides = max(copies * is_product, bytes_per_scale * scales, 8 * scales + statistics + output * (output != held))
    return Bytes(output, 0, held + besides - output)


def distances(program: Program, *, pairs: int, scale: Tensor, bytes_per_scale: int, reduced: bool) -> Bytes:
    """The squared distances of all pairs in units of `scale`, with its normaliser; or their logsumexp."""
    size, output = program.arithmetic.itemsize, program.output
    normaliser = size * scale.numel() // max(1, scale.shape[-1])
    if not reduced:
        return Bytes(output, 0, program.unrounded + normaliser)
    held = size * (pairs + 3 * program.results)
    return (
        Bytes(output, held, normaliser) if program.trained else Bytes(output, 0, held + bytes_per_scale * scale.numel())
    )


def scores(program: Program, *operands: Tensor) -> Bytes:
    """Scaled and masked scores of all pairs, by a matrix product of `operands`, or fused where there are none."""
    output, unrounded, copies = program.output, program.unrounded, program.copies(*operands)
    if program.trained:
        return Bytes(output, copies, unrounded)
    return Bytes(output, 0, unrounded + max(copies - output, 0) if program.dtype != program.arithmetic else 0)


def softmax(program: Program, *operands: Tensor, pairs: int, columns: int, value: Tensor | None) -> Bytes:
    """The softmax of such scores along an axis of `columns`, or the sums of `value` that it weighs."""
    output, unrounded, copies = program.output, program.unrounded, program.copies(*operands)
    size = program.arithmetic.itemsize
    values, statistics = size * pairs, (3 * size + 1) * pairs // max(1, columns)
    if value is None:
        if program.trained:
            return Bytes(output, copies + unrounded, values + statistics)
        return Bytes(output, 0, values + max(copies - output, statistics))
    value_copy = program.copies(value)
    if program.trained:
        return Bytes(output, copies + value_copy + values, max(values + statistics - output, unrounded))
    # Beside the scores or the weights: for the scores, for the weights, and for the result.
    besides = max(copies, value_copy + values + statistics, value_copy + max(output, unrounded))
    return Bytes(output, 0, values + besides - output)


def attention_over_pattern(program: Program, query: Tensor, key: Tensor, value: Tensor) -> Bytes:
    """Attention over a pattern of positions, which becomes a mask."""
    output, unrounded, copies = program.output, program.unrounded, program.copies(query, key)
    mask = query.shape[-2] * key.shape[-2]
    values = program.arithmetic.itemsize * math.prod(broadcast_shapes(query.shape[:-2], key.shape[:-2])) * mask
    if program.trained:
        return Bytes(output, values + mask + copies + program.copies(value), unrounded)
    temporary = values + max(copies, program.copies(value) + unrounded)
    return Bytes(output, 0, temporary - output if unrounded else temporary)
