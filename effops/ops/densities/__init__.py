"""Log densities of every pair of points and parameters, and their mixtures.

It may import `dispatch`, `prediction`, `blocks` and `numerics`. Start with `power_spherical.py`, a density of
directions, or with `normal.py`. `density.py` and `mixture.py` make ops of densities.
"""
