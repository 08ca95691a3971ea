"""Dtypes, rounding and special functions. It imports nothing of effops but `pytorch`. Start with `precision.py`."""
