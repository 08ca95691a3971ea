"""The plain expression of every op, as its table in the documentation has it, as far as shapes and dtypes tell.

What these accept, an op should. Functions of one tensor, such as normalisers, are left out where they change neither.
"""

import math

import torch
from torch.distributions import Independent, Normal
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention


def directional(loc, scale, x):
    if x.shape[-1] < 2:
        raise ValueError("a density on a sphere needs two coordinates")
    return scale * (loc * x).sum(-1)


def normal(loc, scale, x):
    if isinstance(scale, torch.Tensor) and not scale.is_floating_point():
        scale = scale.to(loc.dtype)  # of integers, PyTorch takes logarithms in float32
    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False).log_prob(x)


def mixture(log_prob):
    return lambda log_weights, loc, scale, x, dim=-1: torch.logsumexp(log_weights + log_prob(loc, scale, x), dim)


def masked(scores, attn_mask=None, is_causal=False):
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    if isinstance(attn_mask, CausalBias):
        attn_mask = attn_mask._materialize(scores.device)
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask


def matrix_product(left, right):
    if left.dtype != right.dtype:
        raise TypeError("matrices must have one dtype: PyTorch does not notice if they are empty")
    return left @ right


def dot_products(query, key, attn_mask=None, is_causal=False, scale=None):
    scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    return masked(matrix_product(query, key.mT) * scale, attn_mask, is_causal)


def attention(query, key, value, attn_mask=None, **settings):
    if settings.get("enable_gqa") and key.shape[-3] == 0:
        raise ValueError("there must be a head of keys: without one, PyTorch's division by zero ends the process")
    return scaled_dot_product_attention(query, key, value, attn_mask, **settings)


def additive(query, key, weight):
    return (weight * torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))).sum(-1)


def log_sparse(query, key, value, local=1, restart=None, scale=None):
    return matrix_product(torch.softmax(dot_products(query, key, is_causal=True, scale=scale), -1), value)


PLAIN = {
    "broadcast_dot": lambda a, b: (a * b).sum(-1),
    "power_spherical_log_prob": directional,
    "von_mises_fisher_log_prob": directional,
    "normal_log_prob": normal,
    "power_spherical_mixture_log_prob": mixture(directional),
    "von_mises_fisher_mixture_log_prob": mixture(directional),
    "normal_mixture_log_prob": mixture(normal),
    "attention_scores": dot_products,
    "attention_weights": lambda *args, **settings: torch.softmax(dot_products(*args, **settings), -1),
    "attention": attention,
    "additive_attention_scores": additive,
    "additive_attention": lambda query, key, value, weight, attn_mask=None: matrix_product(
        torch.softmax(masked(additive(query, key, weight), attn_mask), -1), value
    ),
    "log_sparse_attention": log_sparse,
}
