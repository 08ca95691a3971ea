"""The largest batch that fits, beside all smaller ones as they ran; what a CUDA device holds beside the tensors."""

import doctest

import pytest
import torch
from torch import nn

from effops import text as formats
from effops.memory import Workload, anatomy, batches, max_batch_size, parse_bytes
from effops.memory.measured import measured_timeline
from effops.memory.models import ARCHITECTURES, Configuration, workload_parts
from effops.prediction.cuda_forms import CachingAllocator, reserved_bytes
from effops.prediction.timeline import Allocation, Timeline

MIB = 2**20


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(5, 24, 2, batch_first=True), nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.layers(x)[0])


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 1))


def workload(model, *shape: int) -> Workload:
    return Workload(
        model,
        lambda size: torch.randn(size, *shape),
        lambda model, x: nn.functional.mse_loss(model(x), torch.zeros(())),
        torch.optim.Adam,
    )


SMALL = Configuration(d_model=16, layers=1, heads=2, d_ff=24, seq_len=40)
WORKLOADS = {
    **{name: Workload(**workload_parts(name, SMALL)) for name in ARCHITECTURES},
    "convolutions": workload(convolutions, 3, 16, 16),
    "lstm": workload(Recurrent, 30, 5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", WORKLOADS)
def test_largest_batch_is_that_of_all_that_ran(name):
    peaks = [measured_timeline(WORKLOADS[name], size).peak_bytes for size in range(1, 9)]
    fitting = 3 if list(WORKLOADS).index(name) % 2 else 6
    budget = (peaks[fitting - 1] + peaks[fitting]) // 2
    found = max_batch_size(WORKLOADS[name], budget)
    assert found.batch_size == fitting == sum(peak <= budget for peak in peaks)
    assert abs(found.predicted_peak_bytes - peaks[fitting - 1]) <= 64
    assert found.predicted_peak_bytes <= budget < found.next_peak_bytes
    assert {fitting, fitting + 1} <= set(found.tried)


def perceptron(**options) -> Workload:
    parts = {
        "model": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)),
        "batch": lambda size: torch.randn(size, 64),
        "loss": lambda model, x: model(x).sum(),
        "optimizer": torch.optim.Adam,
    }
    return Workload(**{**parts, **options})


def test_few_predictions_lead_to_large_batches():
    found = max_batch_size(perceptron(), "1 GiB")
    assert found.batch_size > 10**6
    assert len(found.tried) <= 8
    assert (
        anatomy(perceptron(), found.batch_size).peak_bytes
        <= 2**30
        < anatomy(perceptron(), found.batch_size + 1).peak_bytes
    )


@pytest.mark.parametrize(("options", "size"), [({"multiple_of": 48}, 48), ({"power_of_two": True}, 1)])
def test_only_some_sizes(options, size):
    every = max_batch_size(perceptron(), "3 MiB").batch_size
    found = max_batch_size(perceptron(), "3 MiB", **options)
    assert found.batch_size % size == 0
    assert found.batch_size <= every
    following = 2 * found.batch_size if "power_of_two" in options else found.batch_size + size
    assert anatomy(perceptron(), following).peak_bytes == found.next_peak_bytes > 3 * MIB
    if "power_of_two" in options:
        assert found.batch_size.bit_count() == 1


def test_a_probe_runs_what_it_returns():
    predicted = max_batch_size(perceptron(), "1 MiB")
    found = max_batch_size(perceptron(), "1 MiB", mode="probe")
    assert found.batch_size == predicted.batch_size
    assert found.tried[found.batch_size] <= MIB < found.tried[found.batch_size + 1]
    assert found.predicted_peak_bytes is None
    sizes = list(found.tried)
    assert sizes[:5] == [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_a_device_holds_more_than_tensors():
    tensors = max_batch_size(perceptron(), "700 MiB", budget_means="tensors", device="cuda").batch_size
    device = max_batch_size(perceptron(), "700 MiB", budget_means="device", device="cuda")
    assert 0 < device.batch_size < tensors
    assert device.predicted_peak_bytes > 600 * MIB
    more = max_batch_size(
        perceptron(), "700 MiB", budget_means="device", device="cuda", context_bytes=300 * MIB
    ).batch_size
    assert device.batch_size < more < tensors


@pytest.mark.parametrize(("device", "means"), [("cpu", "tensors"), ("cuda", "device")])
def test_what_a_budget_means_by_default(device, means):
    options = {"device": device, "power_of_two": True, "context_bytes": "1 MiB"}
    found = max_batch_size(perceptron(), "20 MiB", **options)
    assert found.budget_means == means
    assert f"({means})" in str(found)
    assert found.tried == max_batch_size(perceptron(), "20 MiB", budget_means=means, **options).tried
    if device == "cuda":
        assert found.tried != max_batch_size(perceptron(), "20 MiB", budget_means="tensors", **options).tried


def test_what_a_device_holds_beside_tensors_is_told():
    with pytest.raises(batches.BudgetTooSmallError, match=r"at its peak context 600\.0 MiB"):
        max_batch_size(perceptron(), "400 MiB", device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1000}, r"must hold a step of batch size 1, which takes .* \(at its peak optimizer states"),
        ({"budget": None}, "needs a `budget`"),
        ({"budget": "6 gigs"}, "expected a number and"),
        ({"budget_means": "all"}, "`budget_means` must be"),
        ({"budget_means": "device"}, 'give device="cuda"'),
        ({"mode": "guess"}, "`mode` must be"),
        ({"multiple_of": 0}, "`multiple_of` must be"),
        ({"budget": "10 B"}, r"which takes .*; got 10 B; raise it"),
        ({"context_bytes": "1 gig"}, "max_batch_size: `context_bytes`: expected a number and"),
        ({"multiple_of": 3, "power_of_two": True}, "`multiple_of` must be"),
        ({"mode": "probe", "budget": "900 GiB"}, "of at most a third"),
        ({"mode": "probe", "budget": None}, "of at most a third"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        max_batch_size(perceptron(), **{"budget": "1 MiB", **options})


def test_a_budget_too_small_tells_the_bytes_of_cuda():
    """The smallest step was taken apart for a CPU, where the workload may not name cuda."""
    named = perceptron(model=lambda: nn.Linear(64, 1).to("cuda"), batch=lambda size: torch.randn(size, 64).cuda())
    with pytest.raises(batches.BudgetTooSmallError, match=r"which takes .* \(at its peak .*\); got 100 B; raise it"):
        max_batch_size(named, "100 B", device="cuda")


def test_table():
    text = str(max_batch_size(perceptron(), "1 MiB"))
    assert "largest batch within the budget of 1.0 MiB (tensors)" in text
    assert "next that is allowed, too large" in text


def test_neighbours_look_different():
    """The table said that 109 fits with 2.0 GiB, and that 110 does not, with 2.0 GiB."""
    gib = 2**30
    tried = {1: gib // 50, 109: 2 * gib - 9 * 2**20, 110: 2 * gib + 9 * 2**20, 128: None}
    text = str(batches.MaxBatch(109, tried[109], tried[110], 2 * gib, "tensors", tried))
    assert text.splitlines()[2:] == [
        "                                 batch size      peak",
        "largest that fits                       109  1.99 GiB",
        "next that is allowed, too large         110  2.01 GiB",
    ]
    full = str(batches.MaxBatch(109, tried[109], None, 2 * gib, "tensors", {**tried, 110: None}))
    assert full.endswith("110  out of memory")
    assert formats.format_distinct_bytes(gib, gib + 1, gib) == ["1.000000000 GiB", "1.000000001 GiB", "1.000000000 GiB"]
    assert formats.format_distinct_bytes(gib, 2**20) == ["1.0 GiB", "1.0 MiB"]
    assert "which takes 1.01 GiB; got 1.00 GiB" in batches._too_small_text(1, gib + 10**7, gib, {}, is_number=False)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("6 GiB", 6 * 2**30), ("5GiB", 5 * 2**30), ("1.5 kB", 1500), (7, 7), ("9 B", 9)]
)
def test_texts_of_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


def test_caching_allocator():
    allocator = CachingAllocator()
    small = [allocator.allocate(1000) for _ in range(2048)]
    assert allocator.reserved_bytes == 2 * MIB  # 2,048 blocks of 1,024 bytes
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB
    large = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 24 * MIB  # four in one segment of 20 MiB
    for block in large:
        allocator.release(block)
    allocator.allocate(19 * MIB)  # which has merged again, and of which 1 MiB is left uncut
    assert allocator.reserved_bytes == 24 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 36 * MIB  # large ones have segments of multiples of 2 MiB
    for block in small[::2]:
        allocator.release(block)
    allocator.allocate(1025)
    assert allocator.reserved_bytes == 36 * MIB  # beside the single one
    for block in small[1::2]:
        allocator.release(block)
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 36 * MIB


def test_what_is_reserved_stays():
    both = [Allocation(11 * MIB, 1, 3, "a"), Allocation(11 * MIB, 2, None, "b"), Allocation(0, 4, 5, "c")]
    assert reserved_bytes(Timeline(both, [("forward", 1)], 0, 5)) == 24 * MIB
    after = [Allocation(11 * MIB, 1, 2, "a"), Allocation(11 * MIB, 3, None, "b")]
    assert reserved_bytes(Timeline(after, [("forward", 1)], 0, 3)) == 12 * MIB


def test_examples_of_docstrings():
    tests = doctest.DocTestFinder().find(batches.parse_bytes, globs={"parse_bytes": parse_bytes})
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)
