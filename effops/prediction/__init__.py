"""How many bytes a program takes, found by running it on fake tensors: nothing is computed or allocated.

It may import `numerics`, `text` and `pytorch`. Start with `allocations.py`, which counts storages. `recorder.py`
follows a whole step, and `inside.py` knows what operators allocate that fake tensors do not show. What TorchInductor
allocates is in `inductor.py`.
"""
