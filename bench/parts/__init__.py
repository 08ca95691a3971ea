"""What `bench/run.py` is made of, and what the studies share with it.

`bench/studies/parts` and `bench/device/parts` are links to this folder: Python looks for modules beside the script that
it runs. Start with `comparison.py`.
"""
