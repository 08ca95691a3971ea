"""Small programs with a line that takes their memory, and programs that look alike and are clean.

`program.py` says what each states of itself. `known/` was there while the lint was written; `held_out/` was written by
somebody who knew none of its rules, and counts apart.
"""
