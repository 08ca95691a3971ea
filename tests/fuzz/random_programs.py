"""Random functions of two or three tensors whose axes broadcast: maps, scans, products, and reductions."""

import random

import torch

UNARY = {
    "tanh": torch.tanh,
    "bell": lambda x: torch.exp(-x * x),
    "softplus": torch.nn.functional.softplus,
    "square": lambda x: x * x / (1 + x * x),
    "sine": torch.sin,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "detached": lambda x: x - x.detach().mean(),
}
BINARY = {
    "add": torch.add,
    "difference": lambda x, y: x - y,
    "multiply": torch.mul,
    "distance": lambda x, y: (x - y).abs(),
    "larger": torch.maximum,
    "choose": lambda x, y: torch.where(x > 0.3, x, y),
}
ALONG = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "centred": lambda x, axis: x - x.mean(axis, keepdim=True),
    "scaled": lambda x, axis: x / (x.var(axis, keepdim=True) + 1),
    "running": lambda x, axis: x.cumsum(axis) / 20,
    "running product": lambda x, axis: (1 + x.tanh() / 8).cumprod(axis),
    "running logsumexp": torch.logcumsumexp,
    "highest so far": lambda x, axis: x.cummax(axis).values,
    "flipped": lambda x, axis: x.flip(axis),
    "by place": lambda x, axis: x * _places(x, axis).sin(),
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
}
SIZES = (7, 12, 20, 33, 50, 70)


def _places(x, axis):
    return torch.arange(x.shape[axis], dtype=x.dtype).reshape(
        [-1 if one == axis % x.ndim else 1 for one in range(x.ndim)]
    )


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
            kind = chance.choice(["unary", "along", "binary", "unary", "transposed", "flattened"])
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
