"""The same programs as loops, by vmap, by KeOps and by effops' named ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import effops

from ..ways import Ways, added, along, looped, mapped, squared
from . import boxes, contractions, densities, graphs, kernels, losses, neighbours, pairs

ROWS = 64  # of a part
vmap = torch.func.vmap


def scan_by_op(c: Tensor, b: Tensor, decay: Tensor, hidden: Tensor) -> Tensor:
    scores = effops.broadcast_dot(c[:, :, :, None], b[:, :, None]) * decay
    return effops.broadcast_dot(scores.movedim(3, -1)[..., None, :], hidden.movedim(2, -1)[:, :, None])


def relative_positions_by_op(query: Tensor, distances: Tensor) -> Tensor:
    return effops.broadcast_dot(query.unsqueeze(-2), distances) / math.sqrt(query.shape[-1])


def template_loop(image: Tensor, template: Tensor) -> Tensor:
    window = template.shape[1]
    starts = range(0, image.shape[1] - window + 1, 8)
    parts = (image[:, one : one + 8 + window - 1] for one in starts)
    rows = [checkpoint(contractions.template_differences, one, template, use_reentrant=False) for one in parts]
    return torch.cat(rows, 1)


def mixture_by_op(x: Tensor, logits: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return effops.normal_mixture_log_prob(logits.log_softmax(-1), loc, scale, x.unsqueeze(-2))


def relations_by_vmap(objects: Tensor, first: Tensor, second: Tensor) -> Tensor:
    def of_one(one: Tensor) -> Tensor:
        pairs = torch.cat([one.expand(len(objects), -1), objects], -1)
        return functional.relu(pairs @ first).sum(0)

    return vmap(of_one, chunk_size=16)(objects).sum(0) @ second


def gaussian_sum_by_keops(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    return (-squared(points, sources) / 50).exp() @ weights


def laplacian_sum_by_keops(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    return (-squared(points, sources).sqrt()).exp() @ weights


def density_by_keops(points: Tensor, samples: Tensor) -> Tensor:
    return (-0.5 * squared(points, samples)).logsumexp(1).squeeze(-1) - math.log(len(samples))


def density_by_op(points: Tensor, samples: Tensor) -> Tensor:
    weights = points.new_full((len(samples),), -math.log(len(samples)))
    densities = effops.normal_mixture_log_prob(weights, samples, points.new_ones(1), points.unsqueeze(-2))
    return densities + 0.5 * points.shape[1] * math.log(2 * math.pi)


def row_exponents(rows: Tensor, others: Tensor) -> Tensor:
    return (rows.unsqueeze(1) - others.unsqueeze(0)).pow(2).sum(-1).mul(-2).logsumexp(1)


def uniformity_loop(features: Tensor, others: Tensor) -> Tensor:
    rows = looped(row_exponents, {0: 0}, ROWS, along())(features, others)
    return rows.logsumexp(0) - math.log(len(features) * len(others))


def uniformity_by_vmap(features: Tensor, others: Tensor) -> Tensor:
    rows = mapped(row_exponents, {0: 0}, ROWS)(features, others)
    return rows.logsumexp(0) - math.log(len(features) * len(others))


def uniformity_by_op(features: Tensor, others: Tensor) -> Tensor:
    weights, scale = features.new_zeros(len(others)), features.new_full((1,), 0.5)
    rows = effops.normal_mixture_log_prob(weights, others, scale, features.unsqueeze(-2))
    normaliser = features.shape[1] * (math.log(0.5) + 0.5 * math.log(2 * math.pi))
    return rows.logsumexp(0) + normaliser - math.log(len(features) * len(others))


def kernel_sum(rows: Tensor, others: Tensor) -> Tensor:
    return torch.exp(-(rows[:, None] - others[None]).pow(2).sum(-1) / 50).sum()


def discrepancy_loop(reference: Tensor, test: Tensor) -> Tensor:
    def mean(one: Tensor, other: Tensor) -> Tensor:
        return looped(kernel_sum, {0: 0}, ROWS, added)(one, other) / (len(one) * len(other))

    return mean(reference, reference) + mean(test, test) - 2 * mean(reference, test)


def discrepancy_by_vmap(reference: Tensor, test: Tensor) -> Tensor:
    def mean(one: Tensor, other: Tensor) -> Tensor:
        return vmap(lambda row: kernel_sum(row[None], other), chunk_size=ROWS)(one).mean() / len(other)

    return mean(reference, reference) + mean(test, test) - 2 * mean(reference, test)


def coulomb_by_vmap(positions: Tensor, charges: Tensor) -> Tensor:
    numbers = torch.arange(len(charges))

    def of_one(number: Tensor, position: Tensor, charge: Tensor) -> Tensor:
        is_later = numbers > number
        squares = torch.where(is_later, (position - positions).pow(2).sum(-1), 1)
        return (charge * charges * squares.rsqrt() * is_later).sum()

    return vmap(of_one, chunk_size=ROWS)(numbers, positions, charges).sum()


def row_logits(queries: Tensor, keys: Tensor) -> Tensor:
    return functional.cosine_similarity(queries.unsqueeze(1), keys.unsqueeze(0), dim=-1) / 0.07


def contrastive_loop(queries: Tensor, keys: Tensor) -> Tensor:
    logits = looped(row_logits, {0: 0}, ROWS, along())(queries, keys)
    return functional.cross_entropy(logits, torch.arange(len(queries)))


def contrastive_by_vmap(queries: Tensor, keys: Tensor) -> Tensor:
    logits = mapped(row_logits, {0: 0}, ROWS)(queries, keys)
    return functional.cross_entropy(logits, torch.arange(len(queries)))


def sigmoid_loss_by_vmap(images: Tensor, texts: Tensor, chunk: int) -> Tensor:
    sums = vmap(lambda image: functional.softplus(image @ texts.mT).sum(), chunk_size=chunk)(images)
    return (sums.sum() - (images * texts).sum()) / len(images)


def language_model_loss_by_vmap(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    def of_token(token: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy((token @ weight.mT)[None], target[None])

    return vmap(of_token, chunk_size=ROWS)(hidden, targets).mean()


def nearest_of_rows(rows: Tensor, atoms: Tensor) -> Tensor:
    return ((rows[:, None] - atoms) ** 2).sum(-1).sqrt().topk(3, largest=False).values[:, 1:]


def frame_atoms_loop(atoms: Tensor) -> Tensor:
    return looped(nearest_of_rows, {0: 0}, ROWS, along())(atoms, atoms)


def frame_atoms_by_vmap(atoms: Tensor) -> Tensor:
    return mapped(nearest_of_rows, {0: 0}, ROWS)(atoms, atoms)


def nearest_points_by_keops(queries: Tensor, points: Tensor) -> Tensor:
    return squared(queries, points).Kmin(3, dim=1).sqrt()


def assign_clusters_by_keops(points: Tensor, centres: Tensor) -> Tensor:
    return squared(points, centres).argmin(dim=1).squeeze(-1)


def nearest_of_patches(patches: Tensor, memory_bank: Tensor) -> Tensor:
    return torch.pow(patches[:, None] - memory_bank, 2).sum(2).argmin(1)


def anomaly_loop(patches: Tensor, memory_bank: Tensor) -> Tensor:
    nearest = looped(nearest_of_patches, {0: 0}, 1, along())(patches, memory_bank)
    return (patches - memory_bank[nearest]).norm(dim=1).amax()


def anomaly_by_vmap(patches: Tensor, memory_bank: Tensor) -> Tensor:
    nearest = mapped(nearest_of_patches, {0: 0}, 1)(patches, memory_bank)
    return (patches - memory_bank[nearest]).norm(dim=1).amax()


def anomaly_by_keops(patches: Tensor, memory_bank: Tensor) -> Tensor:
    nearest = squared(patches, memory_bank).argmin(dim=1).squeeze(-1)
    return (patches - memory_bank[nearest]).norm(dim=1).amax()


def squares_to_nearest(rows: Tensor, others: Tensor) -> Tensor:
    return (rows[:, None] - others).square().sum(-1).amin(1)


def chamfer_loop(cloud: Tensor, other: Tensor) -> Tensor:
    loop = looped(squares_to_nearest, {0: 0}, ROWS, along())
    return loop(cloud, other).mean() + loop(other, cloud).mean()


def chamfer_by_vmap(cloud: Tensor, other: Tensor) -> Tensor:
    of_rows = mapped(squares_to_nearest, {0: 0}, ROWS)
    return of_rows(cloud, other).mean() + of_rows(other, cloud).mean()


def chamfer_by_keops(cloud: Tensor, other: Tensor) -> Tensor:
    forth, back = (squared(*pair).argmin(dim=1).squeeze(-1) for pair in ((cloud, other), (other, cloud)))
    there = (cloud - other[forth]).square().sum(-1).mean()
    return there + (other - cloud[back]).square().sum(-1).mean()


HEADS = {0: 3, 1: 3, 2: 4, 3: 3}  # of the operands of a scan
PAIRS = "returns all pairs"
WAYS = {
    "absolute_cost": Ways(
        "formula",
        looped(boxes.absolute_cost, {0: 0}, ROWS, along()),
        mapped(boxes.absolute_cost, {0: 0}, ROWS),
        no_keops=PAIRS,
    ),
    "matched_targets": Ways("loop", vmap=mapped(boxes.matched_targets, {0: 0}, ROWS)),
    "detection_cost": Ways("loop", vmap=mapped(boxes.detection_cost, {0: 0, 1: 0}, ROWS), no_keops=PAIRS),
    "chunk_scan": Ways(
        "contraction",
        looped(contractions.chunk_scan, HEADS, 4, along(3)),
        mapped(contractions.chunk_scan, HEADS, 4, out=3),
        op=scan_by_op,
    ),
    "relative_positions": Ways(
        "contraction",
        looped(contractions.relative_positions, {0: 3, 1: 0}, 8, along(3)),
        mapped(contractions.relative_positions, {0: 3, 1: 0}, 8, out=3),
        op=relative_positions_by_op,
    ),
    "product_of_batch": Ways(
        "contraction",
        looped(contractions.product_of_batch, {0: 0}, 8, along()),
        mapped(contractions.product_of_batch, {0: 0}, 8),
    ),
    "template_differences": Ways("function", template_loop),
    "frequency_response": Ways(
        "contraction",
        looped(contractions.frequency_response, {0: 0, 1: 0}, 1, along()),
        mapped(contractions.frequency_response, {0: 0, 1: 0}, 1),
    ),
    "product_with_squares": Ways("formula", looped(contractions.product_with_squares, {0: 0}, 4, along())),
    "power_spherical": Ways(
        "contraction",
        looped(densities.power_spherical, {2: 0}, 1, along()),
        op=effops.power_spherical_log_prob,
        no_keops=PAIRS,
    ),
    "mixture": Ways("formula", looped(densities.mixture, {0: 0}, ROWS, along()), op=mixture_by_op),
    "graph_attention": Ways("loop", vmap=mapped(graphs.graph_attention, {0: 0, 3: 0}, 16)),
    "relations": Ways("loop", vmap=relations_by_vmap),
    "transducer": Ways("loop", vmap=mapped(graphs.transducer, {0: 1}, 16, out=1)),
    "gaussian_sum": Ways(
        "contraction",
        looped(kernels.gaussian_sum, {0: 0}, ROWS, along()),
        mapped(kernels.gaussian_sum, {0: 0}, ROWS),
        gaussian_sum_by_keops,
    ),
    "laplacian_sum": Ways("loop", vmap=mapped(kernels.laplacian_sum, {0: 0}, ROWS), keops=laplacian_sum_by_keops),
    "density_of_rows": Ways(
        "contraction",
        looped(kernels.density_of_rows, {0: 0}, ROWS, along()),
        mapped(kernels.density_of_rows, {0: 0}, ROWS),
        density_by_keops,
        density_by_op,
    ),
    "uniformity": Ways("contraction", uniformity_loop, uniformity_by_vmap, op=uniformity_by_op),
    "mean_discrepancy": Ways("contraction", discrepancy_loop, discrepancy_by_vmap),
    "coulomb_energy": Ways("loop", vmap=coulomb_by_vmap),
    "similarities": Ways(
        "contraction",
        looped(losses.similarities, {0: 0}, ROWS, along()),
        mapped(losses.similarities, {0: 0}, ROWS),
        no_keops=PAIRS,
    ),
    "contrastive": Ways("contraction", contrastive_loop, contrastive_by_vmap),
    "sigmoid_loss": Ways("loop", vmap=sigmoid_loss_by_vmap),
    "triplets": Ways("loop"),
    "late_interaction": Ways("loop", vmap=mapped(losses.late_interaction, {0: 0}, 1)),
    "language_model_loss": Ways("loop", vmap=language_model_loss_by_vmap),
    "frame_atoms": Ways("function", frame_atoms_loop, frame_atoms_by_vmap),
    "nearest_points": Ways("loop", vmap=mapped(neighbours.nearest_points, {0: 0}, ROWS), keops=nearest_points_by_keops),
    "assign_clusters": Ways(
        "contraction",
        looped(neighbours.assign_clusters, {0: 0}, ROWS, along()),
        mapped(neighbours.assign_clusters, {0: 0}, ROWS),
        assign_clusters_by_keops,
    ),
    "anomaly": Ways("contraction", anomaly_loop, anomaly_by_vmap, anomaly_by_keops),
    "chamfer": Ways("function", chamfer_loop, chamfer_by_vmap, chamfer_by_keops),
    "squared_distances": Ways(
        "contraction",
        looped(pairs.squared_distances, {0: 0}, ROWS, along()),
        mapped(pairs.squared_distances, {0: 0}, ROWS),
        no_keops=PAIRS,
    ),
}
