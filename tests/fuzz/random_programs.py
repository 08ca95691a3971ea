"""Random functions of two or three tensors whose axes broadcast, of what users write: see the tables of steps."""

import math
import random

import torch
from torch.nn import functional

UNARY = {
    "tanh": torch.tanh,
    "bell": lambda x: torch.exp(-x * x),
    "softplus": functional.softplus,
    "gelu": functional.gelu,
    "square": lambda x: x * x / (1 + x * x),
    "sine": torch.sin,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "detached": lambda x: x - x.detach().mean(),
    "masked": lambda x: x.masked_fill(x > 1, 0.25),
    "in double": lambda x: x.double().square().tanh().float(),
    "each by vmap": lambda x: torch.vmap(torch.vmap(torch.atan))(x) if x.ndim > 2 else x,
}
BINARY = {
    "add": torch.add,
    "difference": lambda x, y: x - y,
    "multiply": torch.mul,
    "distance": lambda x, y: (x - y).abs(),
    "larger": torch.maximum,
    "choose": lambda x, y: torch.where(x > 0.3, x, y),
    "masked by": lambda x, y: x.masked_fill(y > 0.5, 0.0),
    "gated": lambda x, y: torch.sigmoid(x) * y,
    "pairs by vmap": lambda x, y: torch.vmap(lambda own, other: own * other + own)(*torch.broadcast_tensors(x, y)),
}
ALONG = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "centred": lambda x, axis: x - x.mean(axis, keepdim=True),
    "scaled": lambda x, axis: x / (x.var(axis, keepdim=True, correction=0) + 1),
    "unit": lambda x, axis: functional.normalize(x, dim=axis),
    "running": lambda x, axis: x.cumsum(axis) / 20,
    "running product": lambda x, axis: (1 + x.tanh() / 8).cumprod(axis),
    "running logsumexp": torch.logcumsumexp,
    "highest so far": lambda x, axis: x.cummax(axis).values,
    "flipped": lambda x, axis: x.flip(axis),
    "rolled": lambda x, axis: x.roll(3, axis),
    "sorted": lambda x, axis: x.sort(axis).values,
    "by place": lambda x, axis: x * _places(x, axis).sin(),
    "causal": lambda x, axis: x.masked_fill(_places(x, axis) > _places(x, axis - 1), 0.0),
    "masked softmax": lambda x, axis: x.masked_fill(_places(x, axis) > x.shape[axis] // 2, -math.inf).softmax(axis),
    "taken in order": lambda x, axis: x.index_select(axis, _order(x, axis)),
    "gathered": lambda x, axis: x.gather(axis, (x > 0).long() * (x.shape[axis] - 1)),
    "below the largest": lambda x, axis: x - x.gather(axis, x.argmax(axis, keepdim=True)),
    "one-hot of the largest": lambda x, axis: x * _one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis),
    "top": lambda x, axis: x - x.topk(min(3, x.shape[axis]), axis).values.mean(axis, keepdim=True),
    "mixed": lambda x, axis: torch.einsum("...i,ij->...j", x.movedim(axis, -1), _matrix(x, axis)).movedim(-1, axis),
    "scores": lambda x, axis: x * torch.einsum("...i,...i->...", *[x.movedim(axis, -1)] * 2).unsqueeze(axis) / 20,
    "each row by vmap": lambda x, axis: torch.vmap(lambda row: row.softmax(-1))(x) if x.ndim > 1 else x,
    "joined": lambda x, axis: torch.cat([x.narrow(axis, 1, x.shape[axis] - 1), x.narrow(axis, 0, 1)], axis),
    "padded": lambda x, axis: (
        functional.pad(x.movedim(axis, -1), (1, 1)).movedim(-1, axis).narrow(axis, 0, x.shape[axis])
    ),
}
REDUCE = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    "max": lambda x, axis: x.max(axis).values,
    "min": lambda x, axis: x.min(axis).values,
    "prod": lambda x, axis: (1 + x.tanh() / 8).prod(axis),
    "std": lambda x, axis: (x * (1 + _places(x, axis).sin())).std(axis),
    "any": lambda x, axis: (x > 0.5).any(axis).float() + x.sum(axis),
    "norm": lambda x, axis: x.norm(dim=axis),
    "var": lambda x, axis: x.var(axis),
    "count": lambda x, axis: (x > 0).sum(axis) * 0.1 + x.mean(axis),
    "at the largest": lambda x, axis: x.gather(axis, x.argmax(axis, keepdim=True)).squeeze(axis),
    "number of the least": lambda x, axis: x.argmin(axis) * 0.1 + x.sum(axis),
    "weighted": lambda x, axis: (x.softmax(axis) * x).sum(axis),
    "cross entropy": lambda x, axis: -x.log_softmax(axis).select(axis, 0),
    "contracted": lambda x, axis: torch.einsum("...i,i->...", x.movedim(axis, -1), _matrix(x, axis)[0]),
    "last": lambda x, axis: x.select(axis, -1),
}
SIZES = (7, 12, 20, 33, 50, 70)


def _places(x, axis):
    return torch.arange(x.shape[axis], dtype=x.dtype).reshape(
        [-1 if one == axis % x.ndim else 1 for one in range(x.ndim)]
    )


def _order(x, axis):
    size = x.shape[axis]
    return torch.arange(size) * 3 % size


def _one_hot(numbers, count):
    return functional.one_hot(numbers, count).float()


def _matrix(x, axis):
    places = torch.arange(x.shape[axis], dtype=x.dtype)
    return torch.sin(places[:, None] * 3 + places) / x.shape[axis] ** 0.5


class RandomProgram:
    """A function and its arguments, always the same for a number. `steps` says what it does."""

    def __init__(self, number):
        chance = random.Random(number)
        torch.manual_seed(number)
        rank = chance.randint(3, 4)
        sizes = [chance.choice(SIZES) for _ in range(rank)]
        self.args = []
        for _ in range(chance.randint(2, 3)):
            shape = [size if chance.random() < 0.6 else 1 for size in sizes]
            self.args.append(torch.randn(shape).requires_grad_(chance.random() < 0.8))
        self.steps = [("binary", chance.choice([*BINARY]), number) for number in range(1, len(self.args))]
        for _ in range(chance.randint(0, 3)):
            kind = chance.choice(["unary", "along", "along", "binary", "unary", "transposed", "flattened"])
            table = {"unary": UNARY, "along": ALONG, "binary": BINARY}.get(kind)
            self.steps.append((kind, chance.choice([*table]) if table else "", chance.randrange(100)))
        self.steps += [
            ("reduce", chance.choice([*REDUCE]), chance.randrange(100)) for _ in range(chance.randint(0, rank))
        ]
        if chance.random() < 0.3:
            self.steps.append(("unary", "tanh", 0))

    def __call__(self, *args):
        x = args[0]
        for kind, name, choice in self.steps:
            axis = choice % x.ndim if x.ndim else 0
            if kind == "unary":
                x = UNARY[name](x)
            elif kind == "binary":
                other = args[choice % len(args)]
                x = BINARY[name](x, other) if x.ndim == args[0].ndim and _broadcast(x, other) else x
            elif x.ndim:
                if kind == "along":
                    x = ALONG[name](x, axis)
                elif kind == "transposed":
                    x = x.transpose(0, axis)
                elif kind == "flattened":
                    x = x.flatten(0, 1) if x.ndim > 2 else x
                else:
                    x = REDUCE[name](x, axis)
        return x


def _broadcast(x, other):
    return all(1 in pair or pair[0] == pair[1] for pair in zip(x.shape, other.shape))
