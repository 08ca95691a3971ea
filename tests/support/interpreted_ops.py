"""Run the first case of each op that has a kernel in Triton's interpreter, and compare it with float64.

    TRITON_INTERPRET=1 python tests/support/interpreted_ops.py

It needs nothing that is for tests alone. It prints a line for each op, and exits with 1 if one is wrong.
"""

import sys

import torch

from effops.dispatch.op import Op
from effops.measure import upstream_gradient
from effops.reference import error_ratio, gradient_error_ratio, reference_of, tried_ops


def errors(op: Op) -> tuple[float, float]:
    """Errors of the result and of the gradients, in units of their budgets."""
    reference = reference_of(op)
    drawn = reference.sample_case(
        next(iter(reference.cases)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        generator=torch.Generator().manual_seed(0),
    )
    args = tuple(arg.detach().requires_grad_() for arg in drawn)
    values = tuple(arg.detach() for arg in args)
    out = op(*args, variant="triton")
    dout = upstream_gradient(out)
    gradients = torch.autograd.grad(out, args, dout)
    return error_ratio(op, values, out.detach()), gradient_error_ratio(op, values, dout, gradients)


def main() -> int:
    wrong = []
    for op in tried_ops().values():
        if "triton" not in op.variants:
            continue
        try:
            found = errors(op)
            is_right = max(found) <= 1
            text = "errors of {:.2f} and {:.2f} times their budgets".format(*found)
        except Exception as error:
            is_right, text = False, f"{type(error).__name__}: {error}"
        print(f"{op.name}: {text}", flush=True)
        wrong += [] if is_right else [f"{op.name}: {text}"]
    print(*wrong, sep="\n", file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
