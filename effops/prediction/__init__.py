"""How many bytes a program takes, found by running it on fake tensors: nothing is computed, but for probes.

It may import `numerics`, `text` and `pytorch`. Start with `allocations.py`, which counts storages. `recorder.py`
follows a whole step, and `inside.py` knows what operators allocate that fake tensors do not show. `cpu_kernels.py` and
`observed_forms.py` know more of it, and `probes.py` runs single operators to find it. What TorchInductor allocates for
the compiled forms of ops is in `inductor.py`; `compiled.py` refuses any other compiled function.
"""
