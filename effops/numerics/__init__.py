"""Dtypes, rounding and special functions. It imports nothing of effops. Start with `precision.py`."""
