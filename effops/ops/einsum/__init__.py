"""`effops.einsum`: a contraction of any number of operands within a memory budget.

Start with `contraction.py`, the op. `program.py` runs steps slice by slice. `paths.py` finds the steps, and the labels
to cut, of a pass that keeps the budget.
"""
