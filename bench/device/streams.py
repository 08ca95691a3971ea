"""The founding op's kernels in a CUDA graph, on a second stream and beyond 2^31 elements; see `--help`.

A result that differs from that of a plain call fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping

import torch
from parts.arguments import file_to_write
from torch import Tensor

from effops import power_spherical_log_prob

D = 33


def operands(M: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """loc (M, D), scale (M,) and x (T, 1, D), the same at every call."""
    generator = torch.Generator("cuda").manual_seed(0)
    loc, x = (torch.randn(size, D, device="cuda", generator=generator) for size in (M, T))
    loc, x = (torch.nn.functional.normalize(directions, dim=-1).to(dtype) for directions in (loc, x))
    return loc, torch.rand(M, device="cuda", generator=generator).to(dtype) + 1, x.unsqueeze(1)


def step(loc: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """The result and its gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (loc, scale, x)]
    out = power_spherical_log_prob(*leaves, variant="triton")
    return out.detach(), *torch.autograd.grad(out.sum(), leaves)


def expect_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.cuda.synchronize()
    for number, (tensor, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(tensor, other):
            raise AssertionError(f"result {number} differs by up to {(tensor - other).abs().max()}")


def graph() -> None:
    """A graph that was captured once is replayed with other inputs."""
    args = operands(37, 70)
    expected = step(*args)
    held = [torch.zeros_like(arg) for arg in args]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*held)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step(*held)
    for tensor, arg in zip(held, args, strict=True):
        tensor.copy_(arg)
    captured.replay()
    expect_equal(found, expected)


def second_stream() -> None:
    """A call on a stream waits for what that stream does, and for no other."""
    args = operands(37, 70)
    expected = step(*args)
    late = [torch.zeros_like(arg) for arg in args]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        for tensor, arg in zip(late, args, strict=True):
            tensor.copy_(arg)
        found = step(*late)
    expect_equal(found, expected)


def large_offsets() -> None:
    """More than 2^31 pairs: the last rows of the result lie beyond what 32 bits count."""
    loc, scale, x = operands(2**15 + 1, 2**16 + 3, torch.bfloat16)
    with torch.no_grad():
        out = power_spherical_log_prob(loc, scale, x, variant="triton")
        expected = power_spherical_log_prob(loc, scale, x[-5:], variant="triton")
    assert out.numel() > 2**31
    expect_equal((out[-5:],), (expected,))


CHECKS: Mapping[str, Callable[[], None]] = {
    "graph": graph,
    "second stream": second_stream,
    "large offsets": large_offsets,
}


def main() -> int:
    """Returns the exit code: 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write each outcome there, after each check")
    options = parser.parse_args()
    outcomes: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check()
            outcomes[name] = "ok"
        except (AssertionError, RuntimeError) as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {outcomes[name]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"checks": outcomes}))
    return int(any(outcome != "ok" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
