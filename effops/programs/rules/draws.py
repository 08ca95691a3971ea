"""Operators that draw random numbers: each element alone. A tile has a seed of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.programs.rules.binding import aligned, is_operator
from effops.programs.rules.elementwise import filled
from effops.pytorch.operators import aten

SEED = "seed"  # marks nodes that draw: the node of the call's seed, and a number of their own


def new_seed() -> Tensor:
    """The seed of a call. It is drawn from PyTorch's own generator, which goes on once a call."""
    return torch.randint(2**62, ())


def drawn(operator: Any, number: int, seed: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What an operator draws in a tile with a seed: always the same, and PyTorch's own generator does not go on."""
    if type(seed) is not Tensor or seed.is_meta:
        return operator(*args, **kwargs)
    device = next((one.device for one in args if isinstance(one, Tensor)), kwargs.get("device") or "cpu")
    digest = hashlib.blake2b(f"{seed.item()} {number}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))
    return OF_GENERATOR.get(operator, operator)(*args, **kwargs, generator=generator)


def constant(operator: Any, number: int, seed: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A stand-in for what is drawn, the same at each place."""
    return torch.full_like(drawn(operator, number, seed, *args, **kwargs), 0.5)


def draws_of(graph: Graph) -> list[Node]:
    """The nodes that draw random numbers."""
    return [node for node in graph.nodes if is_operator(node) and torch.Tag.nondeterministic_seeded in node.target.tags]


def give_seeds(graph: Graph) -> None:
    """Let all nodes that draw do so from one seed of a call, where they are cut."""
    found = draws_of(graph)
    if found:
        with graph.inserting_before(found[0]):
            seed = graph.call_function(new_seed)
        seed.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
        for number, node in enumerate(found):
            node.meta[SEED] = seed, number


def seed_of(node: Node) -> Node | None:
    """The node of the seed from which a node draws; None if it draws nothing."""
    return node.meta[SEED][0] if SEED in node.meta else None


def seeded(node: Node, made: Node, seed: Node) -> None:
    """Let a node of a tile draw from the seed of the tile."""
    operator: Any = made.target
    made.args = (operator, node.meta[SEED][1], seed, *made.args)
    made.target = drawn


RULES = {
    aten.bernoulli.default: aligned,
    aten.bernoulli.p: aligned,
    aten.bernoulli.Tensor: aligned,
    aten.cauchy.default: aligned,
    aten.exponential.default: aligned,
    aten.geometric.default: aligned,
    aten.log_normal.default: aligned,
    aten.normal.Tensor_float: aligned,
    aten.normal.Tensor_Tensor: aligned,
    aten.normal.float_Tensor: aligned,
    aten.normal_functional.default: aligned,
    aten.poisson.default: aligned,
    aten.uniform.default: aligned,
    aten.rand_like.default: aligned,
    aten.randn_like.default: aligned,
    aten.randint_like.default: aligned,
    aten.randint_like.low_dtype: aligned,
    aten.normal.float_float: filled,
    aten.rand.default: filled,
    aten.randn.default: filled,
    aten.randint.default: filled,
    aten.randint.low: filled,
}
SIZES = {rule_of: "size" for rule_of, rule in RULES.items() if rule is filled}
OF_GENERATOR = {  # the same operators, with a generator as an argument
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.rand_like.default: aten.rand_like.generator,
    aten.randn_like.default: aten.randn_like.generator,
    aten.randint_like.default: aten.randint_like.generator,
    aten.randint_like.low_dtype: aten.randint_like.low_generator_dtype,
}
