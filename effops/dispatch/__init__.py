"""Choose the variant of an op that runs, and define what an op is made of. This folder knows no op.

It may import `prediction` and `numerics`. Start with `op.py` (what an op and a variant are) and `call.py` (what happens
when an op is called). Then read `custom_op.py` (how a forward and a backward function become a PyTorch operator).
"""
