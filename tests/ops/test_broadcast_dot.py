"""What is peculiar to broadcast_dot: a single coordinate against several."""

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.ops.broadcast_dot import op
from effops.reference import reference_of


@pytest.mark.parametrize("variant", [v for v in op.variants if v != "compile"])
def test_a_sum_that_would_overflow_is_not_taken(variant, device):
    a, b = torch.full((1, 2), 3e38, device=device), torch.full((1, 1), 1e-10, device=device)
    torch.testing.assert_close(op(a, b, variant=variant), (a * b).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("a", "b"), [((1_000_000, 4), (1,)), ((4, 40_000), (3, 1, 1)), ((1_000_000, 1), (4,))], ids=str
)
def test_memory_of_a_single_coordinate(a, b, dtype, device, generator):
    args = reference_of(op).sample(a, b, dtype=dtype, device=device, generator=generator)
    measured = memory(Pass(lambda *args: op(*args, variant="chunked"), args))
    predicted = effops.explain(op.name, *args).variants["chunked"]
    assert measured.temporary_bytes <= 4 * 2**20
    assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= max(2**16, 0.1 * measured.temporary_bytes)
