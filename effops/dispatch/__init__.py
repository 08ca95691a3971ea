"""Choose the variant of an op that runs, and define what an op is made of. This folder knows no op.

It may import `prediction`, `numerics` and `pytorch`. Start with `op.py` (what an op and a variant are), then
`call.py` (what happens when an op is called) and `custom_op.py` (how a forward and a backward function become an
operator of PyTorch).
"""
