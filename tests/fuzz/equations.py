"""Random calls of `effops.einsum`: an equation of two to five operands, their layouts, and a budget."""

import random
from dataclasses import dataclass

import torch

DTYPES = (torch.float32,) * 4 + (torch.float64, torch.bfloat16)
SIZES = (1, 2, 3, 5, 8, 13, 21)


@dataclass(frozen=True)
class RandomContraction:
    """A call, and a budget; without one it is that of the default."""

    equation: str
    operands: tuple[torch.Tensor, ...]
    share: float | None  # of the bytes that the pass takes without slices, which are the budget


def random_contraction(number: int) -> RandomContraction:
    """The call of this number, always the same."""
    chance = random.Random(number)
    torch.manual_seed(number)
    letters = "abcdefg"[: chance.randint(2, 7)]
    sizes = {letter: chance.choice(SIZES) for letter in letters}
    if chance.random() < 0.03:
        sizes[letters[0]] = 0
    dots = [chance.choice(SIZES[:5]) for _ in range(chance.randint(1, 2))] if chance.random() < 0.2 else None
    terms, operands, dtype = [], [], chance.choice(DTYPES)
    for _ in range(chance.randint(2, 5)):
        term = chance.sample(letters, chance.randint(1, min(4, len(letters))))
        if chance.random() < 0.1:
            term.append(chance.choice(term))  # a diagonal
        shape = [sizes[letter] for letter in term]
        if chance.random() < 0.1 and len(set(term)) == len(term):
            shape[chance.randrange(len(shape))] = 1  # broadcasts
        text = "".join(term)
        if dots and chance.random() < 0.7:
            own = [size if chance.random() < 0.8 else 1 for size in dots[chance.randint(0, len(dots) - 1) :]]
            place = chance.randint(0, len(term))
            shape[place:place] = own
            text = f"{text[:place]}...{text[place:]}"
        terms.append(text)
        operands.append(laid_out(shape, dtype, chance))
    known = sorted({letter for term in terms for letter in term if letter != "."})
    kept = chance.sample(known, chance.randint(0, min(4, len(known))))
    output = "".join(kept)
    if any("..." in term for term in terms):
        place = chance.randint(0, len(output))
        output = f"{output[:place]}...{output[place:]}"
    equation = ",".join(terms) + (f"->{output}" if chance.random() < 0.9 else "")
    share = chance.choice((None, 0.9, 0.5, 0.2))
    return RandomContraction(equation, tuple(operands), share)


def laid_out(shape: list[int], dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    """Normal numbers: contiguous, with the axes in another order, with a step along the last axis, or expanded."""
    how = chance.choice(("contiguous", "contiguous", "permuted", "sliced", "expanded")) if shape else ""
    if how == "permuted":
        order = chance.sample(range(len(shape)), len(shape))
        tensor = torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    elif how == "sliced":
        tensor = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif how == "expanded":
        axis = chance.randrange(len(shape))
        tensor = torch.randn([1 if place == axis else size for place, size in enumerate(shape)]).expand(shape)
    else:
        tensor = torch.randn(shape)
    if how == "expanded":  # `to` would keep the strides, but converts what is read once
        return tensor.to(dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype).copy_(tensor)
