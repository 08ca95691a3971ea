"""Random calls of every op, each described by plain data, which hypothesis prints and makes smaller.

Shapes come from the cases of the op's reference, with other sizes: an op that is registered is drawn too.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from effops.dispatch.op import ops
from effops.numerics.precision import FLOATS
from effops.reference import reference_of

Shape = tuple[int, ...]

MOST_TERMS = 2**14  # how many terms a call has at most, for a hundredth of a second
MOST_TERMS_OF_FEW = 2**8  # of a call whose kernels are interpreted, or that has a gradient for each result
SIZES = (3, 2, 4, 5, 7, 1, 8, 9, 17, 33, 0)
LAYOUTS = ("contiguous",) * 4 + (
    "transposed",
    "sliced",
    "expanded",
    "channels last",
    "offset",
    "odd where single",
    "negated",
)
KINDS = ("Tensor",) * 5 + ("Parameter", "Plain")  # `Plain` is a subclass that overrides nothing
SCALE_KINDS = ("as drawn",) * 6 + ("number", "integers")  # of an operand that may be a number
DEVICES = ("cpu",) * 8 + ("meta", "fake")
TRANSFORMS = ("gradients",) * 5 + (
    "no_grad",
    "inference_mode",
    "grad",
    "vjp",
    "jvp",
    "jacrev",
    "vmap",
    "vmap of grad",
    "functionalize",
)
DERIVATIVES = ("grad", "vjp", "jvp", "jacrev", "vmap of grad")
UNTANGENT = ("expanded", "negated")  # layouts in which PyTorch takes no tangents
SHAPES_ONLY = ("gradients", "no_grad")  # the transforms of calls without values
INTERPRETED = ("gradients", "no_grad", "grad", "vmap")
VARIANTS = (None,) * 6 + ("chunked",) * 4 + ("naive", "naive", "einsum", "sdpa", "torchscript")
ONE_IN = 64  # calls have kernels that Triton's interpreter runs: each takes as long as a hundred others
MASKS = (None,) * 6 + ("boolean",) * 4 + ("additive",) * 3 + ("is_causal",) * 3 + ("upper_left", "lower_right")
CAUSAL_BIASES = ("upper_left", "lower_right")
MISTAKES = (
    "another size",
    "an axis less",
    "no axis",
    "integers",
    "booleans",
    "complex",
    "another device",
    "sparse",
    "a list",
    "a number",
    "an array",
    "None",
    "a subclass",
    "a setting of text",
    "an unknown variant",
)


@dataclass(frozen=True)
class Operand:
    """A tensor. Under `vmap` it has an axis of examples if `batched`, in the place `axis`."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    kind: str = "Tensor"
    wanted: bool = False
    batched: bool = False
    axis: int = 0


@dataclass(frozen=True)
class RandomCall:
    """A call. The operands are those of the op in their order, and then the mask, if it is a tensor."""

    op: str
    operands: tuple[Operand, ...]
    mask: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    transform: str = "gradients"
    device: str = "cpu"
    in_small_blocks: bool = False
    upstream: str = "contiguous"
    mistake: str | None = None
    seed: int = 0


def drawn_settings(draw, parameters, rank):
    """A value for each setting that a public function takes."""
    strategies = {
        "scale": st.sampled_from((None, None, 0.3, 3, -2.0, 0.0)),
        "dropout_p": st.just(0.0),
        "dim": st.integers(-max(1, rank), max(0, rank - 1)),
        "local": st.sampled_from((1, 2, 3, 7)),
        "restart": st.sampled_from((None, None, 7, 11)),
    }
    drawn = {name: draw(strategies[name]) for name in parameters}
    return {name: value for name, value in drawn.items() if value is not None}


@st.composite
def random_calls(draw, variants=VARIANTS):
    op = ops()[draw(st.sampled_from(sorted(ops())))]
    signature = inspect.signature(op.function).parameters
    parameters = [name for name in signature if name != "variant"]
    dims = {name: dim for name, dim in op.core_dims.items() if name != "attn_mask"}
    variant = draw(st.sampled_from([name for name in variants if name is None or name in op.variants]))
    if "triton" in op.variants and draw(st.integers(1, ONE_IN)) == ONE_IN:
        variant = "triton"
    transform = draw(st.sampled_from(INTERPRETED if variant == "triton" else TRANSFORMS))
    device = draw(st.sampled_from(DEVICES)) if transform in SHAPES_ONLY else "cpu"
    most = MOST_TERMS_OF_FEW if variant == "triton" or transform == "jacrev" else MOST_TERMS
    choices = SIZES[:-1] if transform == "jacrev" else SIZES  # PyTorch cannot batch all operators over no results
    shapes = drawn_shapes(draw, op, list(dims.values()), most, choices)
    grouped = "enable_gqa" in parameters and min(map(len, shapes)) > 2 and draw(st.booleans())
    batch_shapes = [shape[: max(0, len(shape) - dim)] for shape, dim in zip(shapes, dims.values())]
    if grouped:
        shapes = with_shared_heads(draw, *shapes)
        batch_shapes = [shapes[0][:-2], *((*shape[:-1], 1) for shape in batch_shapes[1:])]
    batch = torch.broadcast_shapes(*batch_shapes)
    mask = draw(st.sampled_from(MASKS)) if "attn_mask" in parameters else None
    if mask in ("is_causal", *CAUSAL_BIASES) and "is_causal" not in parameters:
        mask = None if mask == "is_causal" else mask
    if mask in ("boolean", "additive"):
        shapes.append(mask_shape(draw, (*batch, shapes[0][-2], shapes[1][-2])))
    dtype = draw(st.sampled_from(FLOATS))
    mixed = draw(st.integers(0, 3)) == 0
    operands = [drawn_operand(draw, shape, draw(st.sampled_from(FLOATS)) if mixed else dtype) for shape in shapes]
    if transform in DERIVATIVES:
        operands[0] = replace(operands[0], wanted=True)
    takes_numbers = [place for place, name in enumerate(dims) if "float" in str(signature[name].annotation)]
    for place in takes_numbers:
        kind = draw(st.sampled_from(SCALE_KINDS))
        if kind == "integers" or (kind == "number" and math.prod(shapes[place]) == 1):
            operands[place] = replace(operands[place], kind=kind)
    if device == "fake":  # which takes no subclass
        operands = [replace(one, kind="Tensor" if one.kind == "Plain" else one.kind) for one in operands]
    if transform == "jvp":
        operands = [replace(one, layout="contiguous") if one.layout in UNTANGENT else one for one in operands]
    may_be_wrong = transform in SHAPES_ONLY and device == "cpu"
    others = [name for name in parameters if name not in ("enable_gqa", "attn_mask", "is_causal", *dims)]
    return RandomCall(
        op.name,
        tuple(operands),
        mask,
        drawn_settings(draw, others, len(batch)) | ({"enable_gqa": True} if grouped else {}),
        variant,
        transform,
        device,
        draw(st.booleans()),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(MISTAKES)) if may_be_wrong and draw(st.integers(1, 8)) == 8 else None,
        draw(st.integers(0, 2**16)),
    )


def drawn_operand(draw, shape, dtype):
    return Operand(
        shape,
        dtype,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(KINDS)),
        draw(st.integers(0, 3)) > 0,
        draw(st.integers(0, 3)) > 0,
        draw(st.integers(0, len(shape))),
    )


def drawn_shapes(draw, op, dims, most, choices):
    """The shapes of a case with other sizes, some batch axes of which an operand has not, or has with size 1."""
    case = draw(st.sampled_from(list(reference_of(op).cases.values())))[: len(dims)]
    sizes = {size: draw(st.sampled_from(choices)) for size in sorted({size for shape in case for size in shape} - {1})}
    if math.prod(max(1, sizes.get(size, 1)) for shape in case for size in shape) > most**1.5:
        sizes = {size: min(other, 3) for size, other in sizes.items()}
    shapes = []
    for shape, dim in zip(case, dims):
        axes = max(0, len(shape) - dim)
        kept = [size if size == 1 or draw(st.integers(0, 7)) else 1 for size in shape[:axes]]
        shape = (*(sizes.get(size, 1) for size in kept), *(sizes.get(size, 1) for size in shape[axes:]))
        shapes.append((1, *shape) if draw(st.integers(0, 15)) == 0 else shape)
    return shapes


def with_shared_heads(draw, query, key, value):
    """The shapes with some heads of queries for each of the keys."""
    heads, group = key[-3], draw(st.integers(1, 3))
    shared = value[-3] if value[-3] == 1 else heads
    return [(*query[:-3], heads * group, *query[-2:]), key, (*value[:-3], shared, *value[-2:])]


def mask_shape(draw, pairs):
    """A shape that broadcasts to that of the pairs, or has an axis of its own."""
    kept = tuple(size if draw(st.integers(0, 2)) else 1 for size in pairs)
    shape = kept[draw(st.integers(0, len(kept))) :]
    return (2, *kept) if draw(st.integers(0, 15)) == 0 else shape
