"""Other expressions for what a slice makes: named ops, contractions and functions of libraries.

Each is proposed by its syntax alone. Whether it is equal, and takes less, is found by running it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from effops.programs.large.rules_of_attention import additive_scores, attention, attention_weights
from effops.programs.large.rules_of_densities import mixtures, normal_sums
from effops.programs.large.rules_of_distances import absolute_distances, cosine_similarity, squared_distances
from effops.programs.large.rules_of_losses import linear_cross_entropy
from effops.programs.large.rules_of_products import (
    contraction_paths,
    contractions,
    expanded_products,
    one_hot,
    products,
)
from effops.programs.large.source.branches import straightened
from effops.programs.large.source.patterns import CONTRACTION, LIBRARY, NAMED, Reader, with_replaced
from effops.programs.large.source.slices import Slice
from effops.programs.large.source.trials import Trial

RULES = (
    attention,
    attention_weights,
    additive_scores,
    mixtures,
    normal_sums,
    products,
    squared_distances,
    absolute_distances,
    cosine_similarity,
    contractions,
    contraction_paths,
    linear_cross_entropy,
    one_hot,
    expanded_products,
)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Statements with the same results, and why they take less.

    Attributes:
        how: "named op", "contraction", "library function" or "loop"
        why: why they take less, and what they cost
    """

    how: str
    statements: list[ast.stmt]
    why: str

    @property
    def drops(self) -> bool:
        """Whether it drops weights, which are others than those of the user's own code."""
        nodes = (node for one in self.statements for node in ast.walk(one))
        return any(isinstance(node, ast.keyword) and node.arg == "dropout_p" for node in nodes)


def rewrites(found: Slice, trial: Trial) -> Iterator[Rewrite]:
    """Named ops first, then contractions and functions of libraries; in the order of the rules."""
    straight = straightened(found, trial)
    reader = Reader(straight.found)
    proposals: list[tuple[str, ast.expr, str, str]] = []
    for rule in RULES:
        for node in reader.nodes():
            try:
                made = list(rule(reader, node, trial))
            except (AttributeError, IndexError, KeyError):
                continue
            proposals += [(how, node, source, why) for how, source, why in made]
    for wanted in (NAMED, CONTRACTION, LIBRARY):
        for how, node, source, why in proposals:
            if how == wanted:
                for statements in straight.for_all_calls(with_replaced(straight.found, node, source)):
                    yield Rewrite(how, statements, why)
