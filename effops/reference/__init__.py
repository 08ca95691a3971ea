"""What is right: cases, samples, benchmark sizes, and the float64 bounds of results and gradients: a `Reference` an op.

For tests, the benchmark and `effops doctor`; no call needs it. It may import `ops`, `dispatch` and `numerics`.
`additive.py` also takes pieces from `blocks.tiling`: its terms of all pairs would not fit into memory in float64.

Start with `reference.py`, then `broadcast_dot.py` for an example. All modules here are imported when a reference is
first asked for, so that a new op needs its own module and no other line.
"""

from effops.reference.reference import Reference, error_ratio, gradient_error_ratio, reference_of

__all__ = ["Reference", "error_ratio", "gradient_error_ratio", "reference_of"]
