"""Messages along edges: filters and matrices of each edge, and a dense matrix of few edges.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ATOMS = 64  # a chunk of the mended filters
EDGES = 64  # a chunk of the mended matrices


def continuous_filters(
    features: Tensor, distances: Tensor, neighbours: Tensor, centres: Tensor, weight: Tensor
) -> Tensor:
    smeared = torch.exp(-10 * (distances[..., None] - centres).square())
    filters = smeared @ weight
    return (features[neighbours] * filters).sum(1)


def continuous_filters_mended(
    features: Tensor, distances: Tensor, neighbours: Tensor, centres: Tensor, weight: Tensor
) -> Tensor:
    def of_atoms(distances: Tensor, neighbours: Tensor) -> Tensor:
        filters = torch.exp(-10 * (distances[..., None] - centres).square()) @ weight
        return (filters * features[neighbours]).sum(1)

    chunks = zip(distances.split(ATOMS), neighbours.split(ATOMS))
    return torch.cat([checkpoint(of_atoms, *chunk, use_reentrant=False) for chunk in chunks])


def atoms_and_neighbours(atoms: int, neighbours: int, gaussians: int, d: int) -> tuple[Any, ...]:
    features = torch.randn(atoms, d, requires_grad=True)
    distances = (5 * torch.rand(atoms, neighbours)).requires_grad_()
    centres, weight = torch.linspace(0, 5, gaussians), torch.randn(gaussians, d) / gaussians**0.5
    return features, distances, torch.randint(atoms, (atoms, neighbours)), centres, weight.requires_grad_()


def edge_networks(nodes: Tensor, sources: Tensor, targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    matrices = (hidden @ weight).unflatten(1, (nodes.shape[1], -1))
    messages = torch.bmm(nodes[sources][:, None], matrices).squeeze(1)
    return torch.zeros_like(nodes).index_add(0, targets, messages)


def edge_networks_mended(nodes: Tensor, sources: Tensor, targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    def of_edges(starts: Tensor, hidden: Tensor) -> Tensor:
        return torch.bmm(starts[:, None], (hidden @ weight).unflatten(1, (nodes.shape[1], -1))).squeeze(1)

    chunks = zip(nodes[sources].split(EDGES), hidden.split(EDGES))
    messages = torch.cat([checkpoint(of_edges, *chunk, use_reentrant=False) for chunk in chunks])
    return torch.zeros_like(nodes).index_add(0, targets, messages)


def nodes_and_attributes(nodes: int, edges: int, d: int, hidden: int) -> tuple[Any, ...]:
    sources, targets = (torch.randint(nodes, (edges,)) for _ in range(2))
    weight = (torch.randn(hidden, d * d) / hidden**0.5).requires_grad_()
    return torch.randn(nodes, d, requires_grad=True), sources, targets, torch.rand(edges, hidden), weight


def dense_propagation(nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    adjacency = nodes.new_zeros(len(nodes), len(nodes))
    adjacency.index_put_((targets, sources), nodes.new_ones(len(sources)), accumulate=True)
    return adjacency @ nodes / adjacency.sum(1, keepdim=True).clamp(min=1)


def dense_propagation_mended(nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    sums = torch.zeros_like(nodes).index_add(0, targets, nodes[sources])
    degrees = nodes.new_zeros(len(nodes)).index_add(0, targets, nodes.new_ones(len(sources)))
    return sums / degrees.clamp(min=1)[:, None]


def nodes_and_few_edges(nodes: int, edges: int, d: int) -> tuple[Any, ...]:
    sources, targets = (torch.randint(nodes, (edges,)) for _ in range(2))
    return torch.randn(nodes, d, requires_grad=True), sources, targets


PROGRAMS = (
    Program(
        "continuous_filters",
        "https://github.com/atomistic-machine-learning/schnetpack/issues/162",
        continuous_filters,
        atoms_and_neighbours,
        sizes={"atoms": 128_000, "neighbours": 65, "gaussians": 64, "d": 128},
        small={"atoms": 2_000, "neighbours": 40, "gaussians": 64, "d": 64},
        expected=(
            Expected(
                "smeared = torch.exp(-10 * (distances[..., None] - centres)",
                now=lambda s: 4 * s["atoms"] * s["neighbours"] * s["gaussians"],
                after=lambda s: 4 * s["d"] * max(ATOMS * s["neighbours"], s["atoms"]),
            ),
            *(
                Expected(
                    line,
                    now=lambda s: 4 * s["atoms"] * s["neighbours"] * s["d"],
                    after=lambda s: 4 * s["d"] * max(ATOMS * s["neighbours"], s["atoms"]),
                )
                for line in ("filters = smeared @ weight", "return (features[neighbours] * filters).sum(1)")
            ),
        ),
        mended=continuous_filters_mended,
        backward=True,
        note="three lines of values of pairs; the result has a row for each atom",
    ),
    Program(
        "edge_networks",
        "https://github.com/pyg-team/pytorch_geometric/issues/1415",
        edge_networks,
        nodes_and_attributes,
        sizes={"nodes": 20_000, "edges": 100_000, "d": 64, "hidden": 128},
        small={"nodes": 300, "edges": 1_500, "d": 64, "hidden": 64},
        expected=(
            Expected(
                "matrices = (hidden @ weight).unflatten(1",
                now=lambda s: 4 * s["edges"] * s["d"] ** 2,
                after=lambda s: 4 * s["d"] * max(EDGES * s["d"], s["edges"]),
            ),
        ),
        mended=edge_networks_mended,
        backward=True,
        note="a matrix for each edge, that multiplies one vector",
    ),
    Program(
        "dense_propagation",
        "https://github.com/pyg-team/pytorch_geometric/issues/5101",
        dense_propagation,
        nodes_and_few_edges,
        sizes={"nodes": 50_000, "edges": 250_000, "d": 64},
        small={"nodes": 2_400, "edges": 12_000, "d": 64},
        expected=(
            Expected(
                "adjacency = nodes.new_zeros(len(nodes), len(nodes))",
                now=lambda s: 4 * s["nodes"] ** 2,
                after=lambda s: 4 * s["edges"] * s["d"],
            ),
        ),
        mended=dense_propagation_mended,
        backward=True,
        note="five edges for each node, in a matrix of all pairs",
    ),
)
