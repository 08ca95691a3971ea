"""Calls of every family of kernels that split their sums, and the bytes that each allocates.

    python kernels_workspaces.py        print the bytes on fake tensors, as JSON, for kernels that are compiled

A process of its own, because Triton either compiles or interprets for the whole life of a process.
"""

import json

import torch
from effops.kernels import additive, attention, distances, log_sparse, mixture, pairs, power_spherical
from torch._subclasses.fake_tensor import FakeTensorMode

from effops.prediction.allocations import Allocations

SCORES = {"precision": "highest", "tolerance": 1e-6}


def pairs_forward(new):
    operands = new(2, 33, 17), new(2, 40, 17), new(2, 1, 40).expand(2, 33, 40)
    pairs.forward(power_spherical.MAP, *operands, new(2, 33, 40), **SCORES)


def pairs_backward(new):
    for B, M, N, D in (2, 33, 40, 17), (1, 300, 1, 7), (3, 1, 9, 5):
        operands = new(B, M, D), new(B, N, D), new(B, 1, N).expand(B, M, N), new(B, M, N)
        gradients = new(B, M, D), new(B, N, D), new(B, 1, N)
        pairs.backward(power_spherical.MAP, *operands, *gradients, **SCORES)


def mixture_operands(new, *, scale_dims):
    """Of x, loc, scale, log_weights and statistics."""
    scale = new(1, 2, 1, 70, *(1,) * scale_dims).expand(1, 2, 34, 70, *(-1,) * scale_dims)
    return new(1, 2, 34, 7), new(1, 2, 70, 7), scale, new(1, 2, 34, 70), new(1, 2, 34, 2)


def mixture_gradients(new, *, scale_dims):
    """Of log_weights, x, loc and scale, after the gradient of the result."""
    return new(1, 2, 34), new(1, 2, 34, 70), new(1, 1, 34, 7), new(1, 2, 70, 7), new(1, 2, 1, 70, *(1,) * scale_dims)


def mixture_forward(new):
    mixture.forward(power_spherical.MAP, *mixture_operands(new, scale_dims=0), **SCORES)


def mixture_backward(new):
    operands = *mixture_operands(new, scale_dims=0), *mixture_gradients(new, scale_dims=0)
    mixture.backward(power_spherical.MAP, *operands, **SCORES)


def distances_forward(new):
    distances.forward(new(2, 5, 7), new(2, 40, 7), new(2, 1, 40, 7).expand(2, 5, 40, 7), new(2, 5, 40))


def distances_backward(new):
    scale = new(1, 1, 40, 7)
    operands = new(2, 35, 7), new(2, 40, 7), scale.expand(2, 35, 40, 7), new(2, 35, 40)
    distances.backward(*operands, new(2, 35, 7), new(2, 40, 7), torch.empty_like(scale))


def distances_forward_logsumexp(new):
    distances.forward_logsumexp(*mixture_operands(new, scale_dims=1))


def distances_backward_logsumexp(new):
    distances.backward_logsumexp(*mixture_operands(new, scale_dims=1), *mixture_gradients(new, scale_dims=1))


def additive_scores(new):
    additive.scores(new(2, 9, 17), new(2, 40, 17), new(2, 17), new(2, 9, 40))


def additive_backward(new):
    operands = new(1, 2, 3), new(1, 60, 3), new(1, 3)
    additive.backward(*operands, new(1, 2, 60), *(torch.empty_like(operand) for operand in operands))


def attention_call(output, new, *, boolean=False, dropout_p=0.0):
    query, key, value = new(1, 2, 66, 7), new(1, 2, 40, 7), new(1, 2, 40, 9) if output == "sums" else None
    mask = new(1, 1, 1, 40).expand(1, 2, 66, 40)
    seed = new(1).to(torch.int64) if dropout_p else None
    return attention.AttentionInputs(
        output, query, key, value, mask > 0 if boolean else mask, seed, 0.3, 0, dropout_p, "highest"
    )


def attention_gradients(new, *, value):
    return new(1, 2, 66, 7), new(1, 2, 40, 7), new(1, 2, 40, 9) if value else None, new(1, 1, 1, 40)


def attention_scores(new):
    attention.forward(attention_call("scores", new), new(1, 2, 66, 40))


def attention_weights(new):
    attention.forward(attention_call("weights", new, boolean=True), new(1, 2, 66, 40))


def attention_sums(new):
    attention.forward(attention_call("sums", new), new(1, 2, 66, 9))


def attention_backward_scores(new):
    attention.backward(attention_call("scores", new), new(1, 2, 66, 40), *attention_gradients(new, value=False))


def attention_backward_weights(new):
    attention.backward(attention_call("weights", new), new(1, 2, 66, 40), *attention_gradients(new, value=False))


def attention_backward_sums(new):
    call = attention_call("sums", new, dropout_p=0.25)
    attention.backward(call, new(1, 2, 66, 9), *attention_gradients(new, value=True))


def log_sparse_forward(new):
    log_sparse.forward(new(2, 40, 9), new(2, 40, 9), new(2, 40, 5), new(2, 40, 5), new(1), local=2, restart=16)


def log_sparse_backward(new):
    q, k, v = new(2, 40, 9), new(2, 40, 9), new(2, 40, 5)
    gradients = (torch.empty_like(tensor) for tensor in (q, k, v))
    log_sparse.backward(q, k, v, new(2, 40, 5), *gradients, new(1), local=2, restart=16)


CALLS = (
    pairs_forward,
    pairs_backward,
    mixture_forward,
    mixture_backward,
    distances_forward,
    distances_backward,
    distances_forward_logsumexp,
    distances_backward_logsumexp,
    additive_scores,
    additive_backward,
    attention_scores,
    attention_weights,
    attention_sums,
    attention_backward_scores,
    attention_backward_weights,
    attention_backward_sums,
    log_sparse_forward,
    log_sparse_backward,
)
DTYPES = torch.float32, torch.float64


class Sizes(Allocations):
    """The bytes of every storage, in the order in which operations create them."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def allocate(self, reference, nbytes):
        super().allocate(reference, nbytes)
        self.sizes.append(nbytes)


def allocated(call, dtype):
    """The bytes of every storage that a call creates, its operands first."""
    generator = torch.Generator().manual_seed(0)
    with Sizes() as allocations:
        call(lambda *shape: torch.rand(shape, dtype=dtype, generator=generator))
    return [nbytes for nbytes in allocations.sizes if nbytes]


def allocated_on_fake_tensors(call, dtype):
    with FakeTensorMode():
        return allocated(call, dtype)


if __name__ == "__main__":
    print(json.dumps([[allocated_on_fake_tensors(call, dtype) for dtype in DTYPES] for call in CALLS]))
