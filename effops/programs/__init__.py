"""What any function of tensors takes: the lines whose intermediates are large, and budgets that a test can hold.

It may import `ops`, `prediction`, `dispatch`, `blocks`, `numerics`, `measure`, `text` and `pytorch`. Start with
`large_lines.py`, which has `lint`. `faked.py` runs a program on fake tensors, `observed.py` notes its calls and
storages, `humps.py` has the rules of what is large, and `places.py` finds the source lines.
"""
