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

from effops.numerics.precision import FLOATS
from effops.reference import reference_of, tried_ops

from ..support.calls import on_this_python

Shape = tuple[int, ...]

MOST_TERMS = 2**21  # of a call, if each operand adds its own: it takes a hundredth of a second
MOST_TERMS_OF_LARGE = 2**24  # of a call with many blocks, if operands share their axes
MOST_TERMS_OF_FEW = 2**12  # of a call whose kernels are interpreted, or that has a gradient for each result
SIZES = (3, 2, 4, 5, 7, 1, 8, 9, 17, 33, 0)
LARGE_SIZES = (40, 9, 2, 3, 129, 200, 250, 300, 500, 1000, 1666, 5000, 1, 0)  # of calls with many blocks
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
FACTORS = (1.0,) * 6 + (30.0, 1e-3)  # of the values, unless they are directions
ROWS = (None,) * 6 + ("equal", "opposite")
DEVICES = ("cpu",) * 8 + ("meta", "fake")
SURROUNDINGS = (
    (None,) * 9
    + ("memory full of NaN",) * 2
    + (
        "medium precision",
        "autocast to bfloat16",
        "autocast to float16",
    )
)
AUTOCASTS = ("autocast to bfloat16", "autocast to float16")
SHAPES_ONLY = ("gradients", "no_grad")  # the transforms of calls without values
TRANSFORMS = ("gradients",) * 6 + (
    "no_grad",
    "inference_mode",
    "grad",
    "vjp",
    "jvp",
    "jacrev",
    "jacfwd",
    "vmap",
    "vmap of grad",
    "vmap of jvp",
    "functionalize",
)
DERIVATIVES = ("grad", "vjp", "jvp", "jacrev", "jacfwd", "vmap of grad", "vmap of jvp")
FORWARD_MODE = ("jvp", "jacfwd", "vmap of jvp")
UNTANGENT = ("expanded", "negated")  # layouts in which PyTorch takes no tangents
JACOBIANS = ("jacrev", "jacfwd")
FORWARDS = ("no_grad", "inference_mode", "vmap")
WITH_BACKWARD = ("chunked", "triton", "sdpa")  # the others have PyTorch's, which autocast rounds where it is on
VARIANTS = (None,) * 6 + ("chunked",) * 4 + ("naive", "naive", "einsum", "sdpa", *on_this_python(["torchscript"]))
INTERPRETED = ("gradients", "no_grad", "grad", "vmap")  # transforms of kernels
ONE_IN = 64  # calls have kernels that Triton's interpreter runs: each takes as long as a hundred others
MASKS = (None,) * 8 + ("boolean",) * 5 + ("additive",) * 4 + ("is_causal",) * 4 + ("upper_left",) * 2 + ("lower_right",)
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
    factor: float = 1.0
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
    surroundings: str | None = None
    rows: str | None = None
    upstream: str = "contiguous"
    in_small_blocks: bool = False
    by_name: bool = False
    mistake: str | None = None
    seed: int = 0


def parameters(op):
    """The parameters of an op's public function, and those of them that are tensors, masks left out."""
    taken = inspect.signature(op.function).parameters
    return taken, [name for name in op.core_dims if name != "attn_mask"]


@st.composite
def random_calls(draw, large=False):
    op = tried_ops()[draw(st.sampled_from(sorted(tried_ops().keys() - {"einsum"})))]  # has its own equations
    taken, tensors = parameters(op)
    is_interpreted = "triton" in op.variants and draw(st.integers(1, ONE_IN)) == ONE_IN
    variants = ["triton"] if is_interpreted else [name for name in VARIANTS if name is None or name in op.variants]
    variant = draw(st.sampled_from(variants))
    transform = draw(st.sampled_from(INTERPRETED if is_interpreted else TRANSFORMS))
    device = draw(st.sampled_from(DEVICES)) if transform in SHAPES_ONLY and not is_interpreted else "cpu"
    surroundings = draw(st.sampled_from(SURROUNDINGS)) if device == "cpu" else None
    if surroundings in AUTOCASTS and transform not in FORWARDS and variant not in (None, *WITH_BACKWARD):
        surroundings = None
    shapes = draw(shapes_of(op, transform, is_interpreted, large))
    grouped = "enable_gqa" in taken and min(map(len, shapes)) > 2 and draw(st.booleans())
    batches = [shape[: max(0, len(shape) - op.core_dims[name])] for shape, name in zip(shapes, tensors)]
    if grouped:
        shapes = draw(with_shared_heads(*shapes))
        batches = [shapes[0][:-2], *((*shape[:-1], 1) for shape in batches[1:])]
    batch = torch.broadcast_shapes(*batches)
    mask = draw(st.sampled_from(MASKS)) if "attn_mask" in taken else None
    mask = None if mask == "is_causal" and "is_causal" not in taken else mask
    if mask in ("boolean", "additive"):
        shapes = [*shapes, draw(mask_shapes((*batch, shapes[0][-2], shapes[1][-2])))]
    may_be_wrong = transform in SHAPES_ONLY and device == "cpu"
    return RandomCall(
        op.name,
        tuple(draw(operands_of(shapes, op, transform, device))),
        mask,
        draw(settings_of(op, len(batch), grouped)),
        variant,
        transform,
        device,
        surroundings,
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(LAYOUTS)),
        not large and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(MISTAKES)) if may_be_wrong and draw(st.integers(1, 12)) == 12 else None,
        draw(st.integers(0, 2**16)),
    )


@st.composite
def shapes_of(draw, op, transform, is_interpreted, large):
    """The shapes of a case with other sizes, some batch axes of which an operand has not, or has with size 1."""
    most = MOST_TERMS_OF_FEW if is_interpreted or transform in JACOBIANS else MOST_TERMS
    choices = SIZES[:-1] if transform in JACOBIANS else SIZES  # PyTorch cannot batch all operators over no results
    _, tensors = parameters(op)
    case = draw(st.sampled_from(list(reference_of(op).cases.values())))[: len(tensors)]
    distinct = sorted({size for shape in case for size in shape} - {1})
    sizes = draw(large_sizes(distinct)) if large else {size: draw(st.sampled_from(choices)) for size in distinct}
    if not large and math.prod(max(1, sizes.get(size, 1)) for shape in case for size in shape) > most:
        sizes = {size: min(other, 3) for size, other in sizes.items()}
    shapes = []
    for shape, name in zip(case, tensors):
        axes = max(0, len(shape) - op.core_dims[name])
        kept = [size if draw(st.integers(0, 7)) else 1 for size in shape[:axes]]
        changed = tuple(sizes.get(size, 1) for size in (*kept, *shape[axes:]))
        shapes.append((1, *changed) if draw(st.integers(0, 15)) == 0 else changed)
    return shapes


@st.composite
def large_sizes(draw, distinct):
    """Sizes in the places of others, of which as many are large as the pairs of a call leave room for."""
    sizes, room = {}, MOST_TERMS_OF_LARGE
    for size in draw(st.permutations(distinct)):
        sizes[size] = draw(st.sampled_from([one for one in LARGE_SIZES if one <= room]))
        room //= max(1, sizes[size])
    return sizes


@st.composite
def with_shared_heads(draw, query, key, value):
    """The shapes with some heads of queries for each of the keys."""
    heads, group = key[-3], draw(st.integers(1, 3))
    shared = value[-3] if value[-3] == 1 else heads
    return [(*query[:-3], heads * group, *query[-2:]), key, (*value[:-3], shared, *value[-2:])]


@st.composite
def mask_shapes(draw, pairs):
    """A shape that broadcasts to that of the pairs, or has an axis of its own."""
    kept = tuple(size if draw(st.integers(0, 2)) else 1 for size in pairs)
    return (2, *kept) if draw(st.integers(0, 15)) == 0 else kept[draw(st.integers(0, len(kept))) :]


@st.composite
def operands_of(draw, shapes, op, transform, device):
    taken, tensors = parameters(op)
    dtype = draw(st.sampled_from(FLOATS))
    is_mixed = draw(st.integers(0, 3)) == 0
    layouts = [layout for layout in LAYOUTS if transform not in FORWARD_MODE or layout not in UNTANGENT]
    kinds = KINDS[: -1 if device == "fake" else None]  # there are no fake tensors of a subclass
    drawn = [
        Operand(
            shape,
            draw(st.sampled_from(FLOATS)) if is_mixed else dtype,
            draw(st.sampled_from(layouts)),
            draw(st.sampled_from(kinds)),
            draw(st.sampled_from(FACTORS)),
            draw(st.integers(0, 3)) > 0 or (place == 0 and transform in DERIVATIVES),
            draw(st.integers(0, 3)) > 0 or place == 0,
            draw(st.integers(0, len(shape))),
        )
        for place, shape in enumerate(shapes)
    ]
    for place, name in enumerate(tensors):
        kind = draw(st.sampled_from(SCALE_KINDS)) if "float" in str(taken[name].annotation) else "as drawn"
        if kind == "integers" or (kind == "number" and math.prod(shapes[place]) == 1):
            drawn[place] = replace(drawn[place], kind=kind)
    return drawn


@st.composite
def settings_of(draw, op, rank, grouped):
    """A value for each setting that a public function takes."""
    strategies = {
        "scale": st.sampled_from((None, None, 0.3, 3, -2.0, 0.0)),
        "dropout_p": st.just(0.0),
        "dim": st.integers(-max(1, rank), max(0, rank - 1)),
        "local": st.sampled_from((1, 2, 3, 7)),
        "restart": st.sampled_from((None, None, 7, 11)),
        "enable_gqa": st.sampled_from((True,) if grouped else (None, False)),
    }
    taken, tensors = parameters(op)
    drawn = {
        name: draw(strategies[name]) for name in taken if name not in (*tensors, "attn_mask", "is_causal", "variant")
    }
    return {name: value for name, value in drawn.items() if value is not None}
