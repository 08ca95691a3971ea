"""The same programs as loops, by vmap, by KeOps and by effops' named ops."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import effops

from ..ways import Ways, added, along, kept, looped, mapped, reduced, squared
from . import (
    attention,
    contractions,
    densities,
    derivatives,
    graphs,
    labels,
    layers,
    losses,
    neighbours,
    scores,
    sums,
)

ROWS = 32  # of a part
vmap = torch.func.vmap


def weighted_squares(points: Tensor, means: Tensor, shares: Tensor) -> Tensor:
    centred = points[:, None] - means
    return (shares[..., None, None] * centred[..., :, None] * centred[..., None, :]).sum(0)


def covariances_loop(points: Tensor, means: Tensor, shares: Tensor) -> Tensor:
    sums = looped(weighted_squares, {0: 0, 2: 0}, ROWS, added)(points, means, shares)
    return sums / shares.sum(0)[:, None, None]


def interactions_by_op(fields: Tensor) -> Tensor:
    return effops.broadcast_dot(fields[:, :, None], fields[:, None]).triu(1).sum((1, 2))


def tails_by_op(heads: Tensor, relations: Tensor, entities: Tensor) -> Tensor:
    return effops.broadcast_dot((heads * relations)[:, None], entities)


def render_by_keops(pixels: Tensor, centres: Tensor, scales: Tensor, colours: Tensor) -> Tensor:
    distances = ((kept(pixels) - reduced(centres)) / reduced(scales)) ** 2
    return (-0.5 * distances.sum(-1)).exp() @ colours


def histogram_by_vmap(values: Tensor, bins: Tensor, width: float) -> Tensor:
    def density(one: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((values - one) / width).square()).mean(-1)

    return densities.entropy(vmap(density, out_dims=1, chunk_size=4)(bins))


def mixture_by_op(x: Tensor, logits: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    return effops.normal_mixture_log_prob(logits.log_softmax(-1), means, scales, x.unsqueeze(-2))


def directions_by_op(x: Tensor, logits: Tensor, directions: Tensor, concentrations: Tensor) -> Tensor:
    weights = logits.log_softmax(-1)
    return effops.power_spherical_mixture_log_prob(weights, directions, concentrations, x.unsqueeze(-2))


def squares_of_rows(rows: Tensor, total: Tensor) -> Tensor:
    return (total.unsqueeze(0) - rows.unsqueeze(1)).square().sum(2)


def discrepancy_loop(source: Tensor, target: Tensor) -> Tensor:
    total = torch.cat([source, target])
    distances = looped(squares_of_rows, {0: 0}, ROWS, along())(total, total)
    return densities.discrepancy(distances, len(source))


def discrepancy_by_vmap(source: Tensor, target: Tensor) -> Tensor:
    total = torch.cat([source, target])
    return densities.discrepancy(mapped(squares_of_rows, {0: 0}, ROWS)(total, total), len(source))


def row_similarities(rows: Tensor, views: Tensor) -> Tensor:
    return functional.cosine_similarity(rows[:, None], views[None], dim=-1)


def nt_xent_of(similarity: Tensor, temperature: float) -> Tensor:
    similarity, n = similarity / temperature, len(similarity)
    similarity = similarity.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    return functional.cross_entropy(similarity, torch.arange(n).roll(n // 2))


def nt_xent_loop(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    views = torch.cat([first, second])
    return nt_xent_of(looped(row_similarities, {0: 0}, ROWS, along())(views, views), temperature)


def nt_xent_by_vmap(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    views = torch.cat([first, second])
    return nt_xent_of(mapped(row_similarities, {0: 0}, ROWS)(views, views), temperature)


def language_model_loss_by_vmap(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    def of_token(token: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy((token @ head.mT)[None], label[None])

    return vmap(of_token, chunk_size=ROWS)(hidden, labels).mean()


def ranking_loss_by_vmap(scores: Tensor, relevance: Tensor) -> Tensor:
    def of_one(score: Tensor, own: Tensor) -> Tensor:
        return (functional.softplus(scores - score) * (own > relevance)).sum()

    return vmap(of_one, chunk_size=ROWS)(scores, relevance).sum() / len(scores)


def codes_by_keops(latents: Tensor, codebook: Tensor) -> Tensor:
    return squared(latents, codebook).argmin(dim=2).squeeze(-1)


def nearest_by_keops(queries: Tensor, points: Tensor, values: Tensor, neighbours: int) -> Tensor:
    return values[squared(queries, points).argKmin(neighbours, dim=1)].mean(-1)


def laplace_by_keops(points: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    return (-(kept(points) - reduced(centres)).abs().sum(-1)).exp() @ weights


def process_by_keops(queries: Tensor, observed: Tensor, weights: Tensor, lengthscale: Tensor) -> Tensor:
    return (-0.5 * squared(queries / lengthscale, observed / lengthscale)).exp() @ weights


def attention_by_vmap(nodes: Tensor, source: Tensor, target: Tensor, direction: Tensor) -> Tensor:
    left, right = nodes @ source, nodes @ target

    def of_one(one: Tensor) -> Tensor:
        return torch.softmax(functional.leaky_relu(one + right, 0.2) @ direction, dim=0) @ right

    return vmap(of_one, chunk_size=ROWS)(left)


def whole_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.mT, dim=-1) @ values


def scan_by_op(readouts: Tensor, states: Tensor, values: Tensor, decay: Tensor) -> Tensor:
    weights = effops.broadcast_dot(readouts[:, :, :, None], states[:, :, None]) * decay
    return effops.broadcast_dot(weights.movedim(3, -1)[..., None, :], values.movedim(2, -1)[:, :, None])


def jacobian_loop(network: nn.Module, inputs: Tensor) -> Tensor:
    return torch.cat([derivatives.batch_jacobian(network, part) for part in inputs.split(4)])


def jacobian_by_vmap(network: nn.Module, inputs: Tensor) -> Tensor:
    return vmap(torch.func.jacrev(network), chunk_size=4)(inputs).square().sum((1, 2))


def sums_of_edges(nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros_like(nodes).index_add(0, targets, nodes[sources])


def propagation_loop(nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    total = looped(sums_of_edges, {1: 0, 2: 0}, len(nodes), added)(nodes, sources, targets)
    return total / torch.bincount(targets, minlength=len(nodes)).clamp(min=1)[:, None]


def nearest_farther(distances: Tensor, same: Tensor) -> Tensor:
    farther = ~same[:, None] & (distances[:, None] > distances[..., None])
    return torch.where(farther, distances[:, None], torch.inf).amin(-1)


def triplets_loop(embeddings: Tensor, labels_of: Tensor, margin: float) -> Tensor:
    distances, same = torch.cdist(embeddings, embeddings), labels_of[:, None] == labels_of
    nearest = looped(nearest_farther, {0: 0, 1: 0}, 4, along())(distances, same)
    return labels.mean_of_pairs(distances, nearest, same, margin)


MAPS = {0: 1, 1: 1, 2: 1}  # of queries, keys and values with channels, or heads, in front
CHUNKS = {0: 1, 1: 1, 2: 1, 3: 1}  # of the operands of a scan
WAYS = {
    "codes_to_vectors": Ways(
        "look-up",
        looped(contractions.codes_to_vectors, {0: 0}, ROWS, along()),
        mapped(contractions.codes_to_vectors, {0: 0}, ROWS),
    ),
    "dispatch_tokens": Ways("look-up", looped(contractions.dispatch_tokens, {0: 0, 1: 0, 2: 0}, ROWS, added)),
    "transform_groups": Ways(
        "contraction",
        looped(contractions.transform_groups, {0: 0}, 4, along()),
        mapped(contractions.transform_groups, {0: 0}, 4),
    ),
    "fourier_layer": Ways(
        "contraction",
        looped(contractions.fourier_layer, {0: 0}, 8, along()),
        mapped(contractions.fourier_layer, {0: 0}, 8),
    ),
    "mixture_covariances": Ways("contraction", covariances_loop),
    "sample_gradient_norms": Ways(
        "formula",
        looped(contractions.sample_gradient_norms, {0: 0, 1: 0}, 4, along()),
        mapped(contractions.sample_gradient_norms, {0: 0, 1: 0}, 4),
    ),
    "pair_interactions": Ways(
        "formula",
        looped(contractions.pair_interactions, {0: 0}, 4, along()),
        mapped(contractions.pair_interactions, {0: 0}, 4),
        op=interactions_by_op,
    ),
    "score_all_tails": Ways(
        "contraction",
        looped(contractions.score_all_tails, {0: 0, 1: 0}, 4, along()),
        mapped(contractions.score_all_tails, {0: 0, 1: 0}, 4),
        op=tails_by_op,
        no_keops="returns all pairs",
    ),
    "render_gaussians": Ways("loop", vmap=mapped(densities.render_gaussians, {0: 0}, 64), keops=render_by_keops),
    "soft_histogram": Ways("loop", vmap=histogram_by_vmap),
    "mixture_log_density": Ways(
        "formula", looped(densities.mixture_log_density, {0: 0}, 64, along()), op=mixture_by_op
    ),
    "directions_log_density": Ways(
        "contraction", looped(densities.directions_log_density, {0: 0}, 64, along()), op=directions_by_op
    ),
    "divergence_to_prototypes": Ways(
        "formula", looped(densities.divergence_to_prototypes, {0: 0, 1: 0}, 64, along()), no_keops="returns all pairs"
    ),
    "transport_cost": Ways("loop"),
    "mean_discrepancy": Ways("contraction", discrepancy_loop, discrepancy_by_vmap),
    "nt_xent": Ways("contraction", nt_xent_loop, nt_xent_by_vmap),
    "batch_all_triplets": Ways("loop"),
    "language_model_loss": Ways("loop", vmap=language_model_loss_by_vmap),
    "transducer_joint": Ways("loop", vmap=mapped(losses.transducer_joint, {0: 1}, 4, out=1)),
    "ranking_loss": Ways("loop", vmap=ranking_loss_by_vmap),
    "ensemble_crps": Ways(
        "formula",
        looped(losses.ensemble_crps, {0: 1, 1: 0}, ROWS, along()),
        mapped(losses.ensemble_crps, {0: 1, 1: 0}, ROWS),
    ),
    "nearest_codes": Ways(
        "contraction",
        looped(neighbours.nearest_codes, {0: 1}, ROWS, along(1)),
        mapped(neighbours.nearest_codes, {0: 1}, ROWS, out=1),
        codes_by_keops,
    ),
    "mean_of_nearest": Ways("loop", vmap=mapped(neighbours.mean_of_nearest, {0: 0}, ROWS), keops=nearest_by_keops),
    "chamfer_distance": Ways("loop"),
    "laplace_kernel_sum": Ways(
        "function",
        looped(neighbours.laplace_kernel_sum, {0: 0}, ROWS, along()),
        mapped(neighbours.laplace_kernel_sum, {0: 0}, ROWS),
        laplace_by_keops,
    ),
    "gaussian_process_mean": Ways(
        "loop", vmap=mapped(neighbours.gaussian_process_mean, {0: 0}, ROWS), keops=process_by_keops
    ),
    "best_overlap": Ways("loop", vmap=mapped(neighbours.best_overlap, {0: 0}, 512)),
    "matched_overlap": Ways(
        "formula",
        looped(neighbours.matched_overlap, {0: 0, 1: 0}, ROWS, along()),
        mapped(neighbours.matched_overlap, {0: 0, 1: 0}, ROWS),
    ),
    "graph_attention": Ways("loop", vmap=attention_by_vmap),
    "relative_keys": Ways(
        "contraction",
        looped(scores.relative_keys, {0: 2, 3: 0}, 8, along(2)),
        mapped(scores.relative_keys, {0: 2, 3: 0}, 8, out=2),
    ),
    "late_interaction": Ways("loop", vmap=mapped(scores.late_interaction, {0: 0}, 1)),
    "correlation_volume": Ways(
        "loop of shifts",
        looped(scores.correlation_volume, {0: 1, 1: 1}, 4, along()),
        mapped(scores.correlation_volume, {0: 1, 1: 1}, 4),
    ),
    "span_maxima": Ways("loop", vmap=mapped(scores.span_maxima, {1: 1}, 4, out=1)),
    "attention_of_chunks": Ways(
        "loop", vmap=mapped(whole_attention, {0: 1}, ROWS, out=1), op=partial(effops.attention, scale=1.0)
    ),
    "chunk_scan": Ways(
        "contraction",
        looped(scores.chunk_scan, CHUNKS, 1, along(1)),
        mapped(scores.chunk_scan, CHUNKS, 1, out=1),
        op=scan_by_op,
    ),
    "local_self_attention": Ways("loop", vmap=mapped(attention.local_self_attention, MAPS, 2, out=1)),
    "row_attention": Ways(
        "loop", vmap=mapped(attention.row_attention, {0: 0, 1: 0, 2: 0}, 2), op=partial(effops.attention, scale=1.0)
    ),
    "bilinear_attention": Ways("loop", vmap=mapped(attention.bilinear_attention, {0: 0, 1: 0}, 1)),
    "gradients_of_tokens": Ways(
        "contraction",
        looped(derivatives.gradients_of_tokens, {0: 0, 1: 0}, 1, along()),
        mapped(derivatives.gradients_of_tokens, {0: 0, 1: 0}, 1),
    ),
    "batch_jacobian": Ways("formula", jacobian_loop, jacobian_by_vmap),
    "continuous_filters": Ways("loop", vmap=mapped(graphs.continuous_filters, {1: 0, 2: 0}, 64)),
    "edge_networks": Ways("loop"),
    "dense_propagation": Ways("look-up", propagation_loop),
    "precision_recall_counts": Ways("formula", looped(labels.precision_recall_counts, {0: 0, 1: 0}, 64, added)),
    "instance_means": Ways(
        "contraction",
        looped(labels.instance_means, {1: 2}, 1, along(1)),
        mapped(labels.instance_means, {1: 2}, 1, out=1),
    ),
    "semi_hard_triplets": Ways("formula", triplets_loop),
    "spline_layer": Ways(
        "contraction", looped(layers.spline_layer, {0: 0}, 8, along()), mapped(layers.spline_layer, {0: 0}, 8)
    ),
    "fft_convolution": Ways(
        "contraction", looped(layers.fft_convolution, {0: 0}, 1, along()), mapped(layers.fft_convolution, {0: 0}, 1)
    ),
    "deformable_convolution": Ways("loop"),
    "additive_kernel": Ways("loop", vmap=mapped(sums.additive_kernel, {0: 0}, ROWS), no_keops="returns all pairs"),
    "crf_normaliser": Ways("loop", vmap=mapped(sums.crf_normaliser, {0: 1}, 4)),
}
