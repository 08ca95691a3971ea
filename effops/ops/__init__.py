"""The ops: a module for each op, or for each tight family of ops. It re-exports nothing.

It may import `dispatch`, `prediction`, `blocks` and `numerics`. Start with `broadcast_dot.py`.
"""
