"""What to write where a mask or an operand of attention does not fit the others: the change of it that would fit."""

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from effops.dispatch.arguments import masking_keys, reshaped
from effops.numerics.shapes import broadcast_shapes, do_broadcast, spreads

Shape = tuple[int, ...]


def shapes_of(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def widens(own: Sequence[int], pairs: tuple[int, int]) -> bool:
    """Whether the last two axes of a shape would enlarge those of the pairs, not just broadcast to them."""
    return any(not spreads(size, wanted) for size, wanted in zip((1, 1, *own)[-2:], pairs))


def check_pairs(function: str, mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raise unless the last axes of a mask broadcast to queries and keys."""
    pairs = query.shape[-2], key.shape[-2]
    if not widens(mask.shape, pairs):
        return
    remedy = reshaped("attn_mask", mask.shape, lambda shape: not widens(shape, pairs))
    axes_before = (query.shape[-3], key.shape[-3]) if min(query.ndim, key.ndim) > 2 else ()
    if tuple(mask.shape[-2:]) == axes_before:  # positions, where heads should stand
        remedy = "give tensor.transpose(-3, -2) of the others if their heads follow their positions"
    remedy = remedy or masking_keys("attn_mask", mask.shape, pairs[1], query.ndim)
    raise ValueError(
        f"{function}: `attn_mask` must broadcast to (queries, keys) = {pairs}; got {tuple(mask.shape)}; {remedy}"
    )


def check_batches(function: str, tensors: Mapping[str, Tensor], own_axes: Mapping[str, int], otherwise: str) -> None:
    """Raise unless the batch axes of tensors broadcast.

    Args:
        function: whose call it is
        tensors: of the call, by name
        own_axes: how many of the last axes of each tensor are no batch axes
        otherwise: what to do where no change of one argument makes them broadcast
    """
    batches = {name: tuple(one.shape[: max(0, one.ndim - own_axes[name])]) for name, one in tensors.items()}
    if do_broadcast(*batches.values()):
        return
    remedy = next(_remedies(batches, own_axes), otherwise)
    got = shapes_of(tensors)
    raise ValueError(f"{function}: batch axes, heads among them, must broadcast; got {got}; {remedy}") from None


def sharing_heads(function: str) -> str:
    """What to do where heads of queries and of keys may differ in number or stand elsewhere."""
    grouped = "set enable_gqa=True" if function == "attention" else "repeat_interleave the heads of keys and values"
    return (
        f"expand them, {grouped} if several heads of queries share one of keys, or give tensor.transpose(-3, -2) if "
        "its heads follow its positions"
    )


def _remedies(batches: Mapping[str, Shape], own_axes: Mapping[str, int]) -> Iterator[str]:
    """How to change an argument, or keys and values alike, to broadcast to the others without enlarging them."""
    together = [("key", "value")] if "value" in batches and batches["key"] == batches["value"] else []
    for names in [*((name,) for name in reversed([*batches])), *together]:
        rest = [batch for name, batch in batches.items() if name not in names]
        if not do_broadcast(*rest):
            continue
        own, wanted = batches[names[0]], tuple(broadcast_shapes(*rest))
        for change, batch in _changes(own, wanted):
            if do_broadcast(batch, wanted) and tuple(broadcast_shapes(batch, wanted)) == wanted:
                yield "give " + " and ".join(name + change for name in names)
        if names == ("attn_mask",) and own_axes["attn_mask"] == 2 and len(own) == len(wanted) == 1:
            heads, remainder = divmod(wanted[0], own[0])
            if not remainder:
                yield f"give attn_mask.repeat_interleave({heads}, 0) if the first axis of the others is batch * heads"


def _changes(own: Shape, wanted: Shape) -> Iterator[tuple[str, Shape]]:
    """Code that changes an argument, and its batch axes then.

    It adds axes of size 1 or one is removed; one is taken apart, two are made one, or they are exchanged.
    """
    for missing in range(1, len(wanted) - len(own) + 1):
        for place in range(len(own), 0, -1):
            index = ", ".join([":"] * place + ["None"] * missing)
            yield f"[{index}]", (*own[:place], *(1,) * missing, *own[place:])
    if len(own) > len(wanted):
        for place in (place for place, size in enumerate(own) if size == 1):
            yield f".squeeze({place})", own[:place] + own[place + 1 :]
    if len(own) == 1 and len(wanted) == 2 and own[0] == math.prod(wanted):
        yield f".unflatten(0, {wanted})", wanted
    if len(own) == 2 and len(wanted) == 1 and math.prod(own) == wanted[0]:
        yield ".flatten(0, 1)", wanted
    if len(own) == len(wanted) == 2:
        yield ".transpose(0, 1)", (own[1], own[0])
