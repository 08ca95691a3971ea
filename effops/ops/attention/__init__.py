"""Attention: scores of queries and keys, their softmax, and the sums of values that it weighs.

It may import `dispatch`, `prediction`, `blocks` and `numerics`. Start with `dot_product.py`; `call.py` validates, and
`variants.py` makes an op of a kind of scores.
"""
