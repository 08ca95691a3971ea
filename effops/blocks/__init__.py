"""The block engine: it scores pairs in blocks that fit the cache, and reduces the scores. It knows pairs and no op.

It may import `numerics`. Start with `plan.py` (roles of the axes), `cutting.py` (how blocks are cut) and `limits.py`
(how large they are). These files compute scores: `dots.py`, `distances.py`, `additive.py`, `masked.py`, `weighted.py`,
`log_sparse.py`. These use the scores: `pairs.py` (returns all of them), `logsumexp.py`, `softmax.py`.
"""
