"""Which lines of a program are large, and what to write instead. Start with `humps.py`, which has the rules.

`proposals.py` looks for what to write. Its rules, one file a class of operations, read a slice of the user's function
(`source/slices.py`) by what its names stand for (`source/definitions.py`, `source/patterns.py`). `source/trials.py`
runs what they propose.
"""
