"""Any function of tensors in bounded memory: its graph runs tile by tile, forward and backward.

Start with `function.py`, which has `tiled`. `traced.py` makes the graph of a call, `cuts.py` follows an axis through
it, `plans.py` chooses axes and lengths of tiles within the budget, `loops.py` runs tiles, `combiners.py` puts together
what is reduced, and `checks.py` compares tiles with the whole on a part of the arguments.
"""
