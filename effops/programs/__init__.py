"""What any function of tensors takes: the lines whose intermediates are large, and budgets that a test can hold.

It may import `ops`, `prediction`, `dispatch`, `blocks`, `numerics`, `measure`, `text` and `pytorch`.
Start with `large_lines.py`, which has `lint`, and `limits_of_memory.py`, which has `budget`. `signatures.py` tells when
a budget must be predicted anew. `scripts.py` runs somebody's script, and `writes.py` watches what it writes.

There are two rooms. `capture` notes what a program does, and judges nothing: `faked.py` runs it on fake tensors,
`observed.py` notes its calls and storages, `places.py` finds their source lines, and `untouched.py` puts back what the
run has touched. `large` judges what was noted: `humps.py` has the rules of what is large, `proposals.py` looks for
what to write instead, and `findings.py` tells it.
"""
