"""A step is followed apart from what its caller has set, and leaves nothing changed, in several threads too."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from effops.memory import Workload, advise, anatomy


def model():
    torch.manual_seed(3)
    layer = torch.nn.Linear(8, 8)
    torch.nn.init.trunc_normal_(layer.weight)
    return torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(8, 1))


WORKLOAD = Workload(
    model=model,
    batch=lambda size: torch.randn(size, 8),
    loss=lambda model, batch: model(batch).sum(),
    optimizer=torch.optim.Adam,
)


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.no_grad, torch.autograd.detect_anomaly, lambda: torch.device("meta")],
    ids=["inference", "no_grad", "anomaly", "meta"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_step_does_not_depend_on_its_surroundings(context):
    expected = anatomy(WORKLOAD, 4, measure=True)
    with context():
        found = anatomy(WORKLOAD, 4, measure=True)
    assert found.peak_bytes == expected.peak_bytes
    assert found.measured.peak_bytes == expected.measured.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4], ids=["the builder's seed", "another seed"])
def test_the_random_state_is_left_as_it_was(seed):
    torch.manual_seed(seed)
    for drawn in (0, 1):
        torch.rand(drawn)
        before = torch.get_rng_state()
        advise(WORKLOAD, 4, 2**20)
        anatomy(WORKLOAD, 4)
        assert torch.equal(torch.get_rng_state(), before)


def test_several_threads_leave_no_function_replaced_and_repeat_no_numbers():
    functions = torch.get_rng_state, torch.set_rng_state, torch.nn.init._no_grad_trunc_normal_
    unseeded = Workload(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
        batch=lambda size: torch.randn(size, 8),
    )
    started = threading.Barrier(4, timeout=60)
    numbers = set()

    def work():
        started.wait()
        for _ in range(5):
            anatomy(unseeded, 4)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    count = 0
    while any(thread.is_alive() for thread in threads):
        weight = torch.zeros(2, 2)
        torch.nn.init.trunc_normal_(weight)
        assert weight.any(), "an initialisation in another thread was skipped"
        state = torch.get_rng_state()
        assert type(state) is torch.Tensor
        numbers.add(tuple(torch.rand(4).tolist()))
        count += 1
    assert len(numbers) == count > 0
    assert functions == (torch.get_rng_state, torch.set_rng_state, torch.nn.init._no_grad_trunc_normal_)


def test_anomaly_detection_that_another_thread_leaves_stays_off():
    begun, left = threading.Event(), threading.Event()

    def batch(size):
        begun.set()
        left.wait()
        return torch.randn(size, 4)

    workload = Workload(model=lambda: torch.nn.Linear(4, 4), batch=batch)
    thread = threading.Thread(target=anatomy, args=(workload, 2))
    with torch.autograd.detect_anomaly():
        thread.start()
        begun.wait()
    left.set()
    thread.join()
    assert not torch.is_anomaly_enabled()
    assert torch.is_anomaly_check_nan_enabled()


def test_anatomy_inside_a_fake_mode():
    workload = Workload(model=lambda: torch.nn.Linear(4, 4), batch=lambda size: torch.randn(size, 4))
    expected = anatomy(workload, 2).peak_bytes
    with FakeTensorMode():
        assert anatomy(workload, 2).peak_bytes == expected
