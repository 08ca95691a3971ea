"""How many bytes a program takes, found by running it on fake tensors: nothing is computed or allocated.

It may import `numerics`, `text` and `pytorch`. Start with `allocations.py`, which counts storages. `recorder.py`
follows a whole step, and `inside.py` knows what operators allocate that fake tensors do not show. `cpu_kernels.py`,
`conversions.py` and `autograd_forms.py` know more of it. What TorchInductor allocates for the compiled forms of ops is
in `inductor.py`; `compiled.py` refuses any other compiled function.
"""
