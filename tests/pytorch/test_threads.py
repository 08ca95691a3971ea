"""Any number of threads: right within the same budgets, in the same bytes, and nothing is set for the process."""

import subprocess
import sys

import pytest
import torch

from effops import measure
from effops.reference import error_ratio, gradient_error_ratio, reference_of, tried_ops

from ..support.calls import leaves, on_this_python

NUMBERS = (1, 3)  # of threads; other tests run with as many as there are cores
# No thread has as much to do as another.
SIZES = {"M": 101, "T": 41, "N": 333, "L": 131, "S": 517, "D": 37, "H": 3, "B": 2, "E": 37, "K": 5}
VARIANTS = [
    pytest.param(op, variant, id=f"{op.name}-{variant}")
    for op in tried_ops().values()
    for variant in on_this_python(("sdpa", "chunked", "einsum", "torchscript", "naive"))
    if variant in op.variants
]


@pytest.fixture
def threads():
    """Sets how many threads PyTorch computes with. The former number returns after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def workload(op):
    sizes = {name: SIZES[name] for name in reference_of(op).sizes}
    generator = torch.Generator().manual_seed(0)
    return reference_of(op).workload(**sizes, dtype=torch.float32, device=torch.device("cpu"), generator=generator)


def computed(op, variant, args):
    """The result, and its gradients for a gradient from above that varies."""
    args = leaves(args)
    out = op(*args, variant=variant)
    return out.detach(), *torch.autograd.grad(out, args, upstream(out))


def upstream(out):
    return torch.linspace(-1, 1, out.numel()).view(out.shape)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_any_number_of_threads(op, variant, threads):
    """Each number of threads gives its own bits, and the same ones again."""
    args = workload(op)
    for number in NUMBERS:
        threads(number)
        out, *gradients = computed(op, variant, args)
        assert error_ratio(op, args, out) <= 1
        assert gradient_error_ratio(op, args, upstream(out), gradients) <= 1
        for found, again in zip((out, *gradients), computed(op, variant, args), strict=True):
            torch.testing.assert_close(found, again, rtol=0, atol=0)
        assert torch.get_num_threads() == number
        assert torch.full((), 1e-39) * 1 != 0, "denormal numbers were switched off"


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in tried_ops().values()])
def test_bytes_of_blocks_do_not_follow_threads(op, threads):
    args, taken = workload(op), []
    for number in NUMBERS:
        threads(number)
        taken.append(measure.memory(measure.Pass(lambda *args: op(*args, variant="chunked"), args, False)))
    assert taken[0] == taken[1]


FORKED = """
import torch
from effops.reference import tried_ops
from effops.reference import error_ratio, reference_of

def calls():
    for op in tried_ops().values():
        sizes = {{name: {sizes}[name] for name in reference_of(op).sizes}}
        options = dict(dtype=torch.float32, device=torch.device("cpu"), generator=torch.Generator().manual_seed(0))
        args = tuple(arg.requires_grad_() for arg in reference_of(op).workload(**sizes, **options))
        out = op(*args)
        out.sum().backward()
        yield float(error_ratio(op, tuple(arg.detach() for arg in args), out.detach()))

class Calls(torch.utils.data.IterableDataset):
    def __iter__(self):
        return calls()

torch.set_num_threads(2)
before = list(calls())
loader = torch.utils.data.DataLoader(Calls(), None, num_workers=2, multiprocessing_context="fork", timeout=60)
in_workers = [float(ratio) for ratio in loader]
assert len(before) == {count} and len(in_workers) == 2 * {count}
assert max(before + in_workers) <= 1, (before, in_workers)
"""


@pytest.mark.slow
def test_after_a_fork():
    """Workers of a DataLoader compute with one thread: with more, OpenMP waits for threads that no fork copies."""
    code = FORKED.format(sizes=SIZES, count=len(tried_ops()))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
