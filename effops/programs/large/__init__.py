"""Which lines of a program are large, and what to write instead. Start with `humps.py`, which has the rules."""
