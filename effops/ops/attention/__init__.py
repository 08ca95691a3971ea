"""Attention: scores of queries and keys, their softmax, and the sums of values that it weighs.

It may import `dispatch`, `prediction`, `blocks` and `numerics`. Start with `dot_product.py`. `call.py` validates calls,
and `variants.py` makes ops of a kind of scores.
"""
