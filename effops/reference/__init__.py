"""What is right: cases, samples, benchmark sizes, and the float64 bounds of results and gradients, an object an op.

For tests, the benchmark and `effops doctor`; no call needs it. It may import `ops`, `dispatch` and `numerics`. Start
with `bounds.py`.
"""
