"""The graph of PyTorch's attention under threads that share it, and where hooks on saved tensors are disabled."""

import threading

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

import effops


def test_threads_run_backward_through_one_graph():
    q = torch.randn(2, 4, 64, 32, requires_grad=True)
    out = effops.attention(q, q, q, variant="sdpa").sum()
    (expected,) = torch.autograd.grad(out, q, retain_graph=True)
    found, errors = [], []

    def run():
        try:
            for _ in range(60):
                found.extend(torch.autograd.grad(out, q, retain_graph=True))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 240
    for gradient in found:
        torch.testing.assert_close(gradient, expected)


def test_disabled_hooks_stay_disabled_and_disturb_nothing():
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(effops.attention(q, q, q, variant="sdpa").sum(), q)
    with disable_saved_tensors_hooks("no hooks here"):
        (found,) = torch.autograd.grad(effops.attention(q, q, q, variant="sdpa").sum(), q)
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == "no hooks here"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
