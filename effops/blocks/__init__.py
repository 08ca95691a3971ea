"""The block engine: scores of pairs in blocks that fit the cache, and what is made of them. It knows pairs and no op.

It may import `numerics` and `pytorch`. Start with `plan.py` (roles of the axes), then `tiling.py` (how blocks are cut).
What is scored: `dots.py`, `distances.py`, `additive.py`, `masked.py`, `log_sparse.py`. What is made of the scores:
`pairs.py` (all of them), `logsumexp.py`, `softmax.py`.
"""
