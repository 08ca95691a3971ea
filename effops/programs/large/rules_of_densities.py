"""Rules of log densities of `torch.distributions`."""

from __future__ import annotations

import ast

from torch.distributions import MixtureSameFamily

from effops.programs.large.source.patterns import NAMED, Proposals, Reader, text
from effops.programs.large.source.trials import Trial


def mixtures(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """Log densities of `torch.distributions`, whose objects are made in the slice or are known."""
    found = reader.read(node)
    if found is None or found.name != "log_prob" or len(found.operands) != 2:
        return
    distribution, value = found.operands
    made = reader.read(distribution)
    x, source = ast.unparse(value), text(distribution)
    why = "differences of all pairs are not made"
    if made is not None and made.name == "MixtureSameFamily":
        arguments = ", ".join(map(ast.unparse, made.operands))
        yield NAMED, f"effops.distributions.Mixture({arguments}).log_prob({x})", why
    if made is None and reader.is_a(distribution, MixtureSameFamily):
        arguments = f"{source}.mixture_distribution, {source}.component_distribution"
        yield NAMED, f"effops.distributions.Mixture({arguments}).log_prob({x})", why
    if made is not None and made.name == "Independent":
        base = text(made.operands[0])
        parts = reader.read(made.operands[0])
        loc, scale = f"{base}.loc", f"{base}.scale"
        if parts is not None and parts.name == "Normal" and len(parts.operands) == 2:
            loc, scale = map(ast.unparse, parts.operands)
        yield NAMED, f"effops.normal_log_prob({loc}, {scale}, {x})", why
    weights = f"{source}.mixture_distribution.logits, "
    base = f"{source}.component_distribution.base_dist"
    yield NAMED, f"effops.normal_mixture_log_prob({weights}{base}.loc, {base}.scale, ({x}).unsqueeze(-2))", why
    yield NAMED, f"effops.normal_log_prob({source}.base_dist.loc, {source}.base_dist.scale, {x})", why


def normal_sums(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """`Normal(loc, scale).log_prob(x).sum(-1)`."""
    summed = reader.summed(node)
    found = None if summed is None else reader.read(summed[0])
    if summed is None or found is None or summed[1] != (-1,) or found.name != "log_prob" or len(found.operands) != 2:
        return
    made = reader.read(found.operands[0])
    source = text(found.operands[0])
    loc, scale = f"{source}.loc", f"{source}.scale"
    if made is not None and made.name == "Normal" and len(made.operands) == 2:
        loc, scale = map(ast.unparse, made.operands)
    x = ast.unparse(found.operands[1])
    yield NAMED, f"effops.normal_log_prob({loc}, {scale}, {x})", "differences of all pairs are not made"
