"""The predicted memory of a step beside the measured one: equal to the byte where fake tensors show all there is."""

import copy
import dataclasses
import doctest
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import effops
from effops.memory import Workload, anatomy
from effops.memory import workload as workload_module
from effops.memory.models import ARCHITECTURES, Configuration, workload_parts
from effops.memory.workload import Step
from effops.prediction.recorder import OperatorCall
from effops.prediction.timeline import CATEGORIES, Allocation, Timeline

WAYS = {
    "plain": {},
    "checkpointed": {"checkpoint": True},
    "autocast": {"autocast": torch.bfloat16},
    "accumulated": {"accumulation_steps": 3},
}
SMALL = Configuration(d_model=32, layers=1, heads=4, d_ff=48, seq_len=80)


def is_right(found: effops.memory.Anatomy) -> bool:
    """The peak is right to the byte, but for the numbers that operators wrap in tensors."""
    assert found.measured is not None
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64, "\n".join(found.differences)
    return True


def linear(**options) -> Workload:
    parts = {
        "model": lambda: nn.Linear(256, 1),
        "batch": lambda size: (torch.randn(size, 256), torch.randn(size, 1)),
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "optimizer": torch.optim.Adam,
    }
    return Workload(**{**parts, **options})


def training(model, *shape: int) -> Workload:
    """A step of a model of one tensor, whose loss is the sum of its result."""
    return Workload(model, lambda size: torch.randn(size, *shape), lambda model, x: model(x).sum(), torch.optim.SGD)


@pytest.mark.each_value(all=True)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [*((name, "naive") for name in ARCHITECTURES), ("tst", "fused"), ("encoder_only_tst", "log_sparse")],
)
def test_predicted_peak_is_the_measured_one(architecture, attention, way):
    parts = workload_parts(architecture, dataclasses.replace(SMALL, attention=attention))
    for batch_size in (3, 7):
        found = anatomy(Workload(**parts, **WAYS[way]), batch_size, measure=True)
        assert is_right(found)


def test_categories_are_the_measured_ones():
    found = anatomy(Workload(**workload_parts("tst", SMALL)), 4, measure=True)
    for name, predicted in found.instants.items():
        for category, nbytes in predicted.items():
            assert abs(nbytes - found.measured.instants[name][category]) <= 64, (name, category)
    assert list(found.instants) == ["after setup", "end of forward", "peak", "end of backward", "end of step"]
    assert set(found.categories) == set(CATEGORIES)


@pytest.mark.slow
def test_predictions_repeat():
    workload = Workload(**workload_parts("encoder_only_tst", SMALL))
    assert len({anatomy(workload, 5).peak_bytes for _ in range(10)}) == 1


def test_categories_of_a_linear_layer():
    parameters, floats, rows = 257, 4, 512
    found = anatomy(linear(), rows)
    setup, backward = found.instants["after setup"], found.instants["end of backward"]
    assert setup["weights"] == floats * parameters
    assert setup["optimizer states"] == floats * (2 * parameters + 2)  # and a step for the weight and for the bias
    assert setup["gradients"] == 0
    assert backward["gradients"] == floats * parameters
    assert backward["inputs"] == floats * rows * parameters
    assert found.instants["end of forward"]["saved activations"] == 2 * floats * rows  # the result, and under the loss
    assert found.operations["forward", "contractions"] == 2 * rows * 256
    assert found.peak_bytes == sum(found.instants["peak"].values())


def test_contractions_of_backward_are_twice_those_of_forward():
    found = anatomy(Workload(**workload_parts("tst", SMALL)), 4)
    ratio = found.operations["backward", "contractions"] / found.operations["forward", "contractions"]
    assert 1.9 < ratio <= 2


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("features", "hidden"), [(8, 32), (20, 20), (5, 64), (32, 32)])
def test_lstm(features, hidden, batch_first):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(features, hidden, 2, batch_first=batch_first)

        def forward(self, x):
            return self.layers(x)[0]

    for batch_size in (3, 9):
        found = anatomy(training(Recurrent, 30, features), batch_size, measure=True)
        assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found


def test_convolutions():
    def model():
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())

    found = anatomy(training(model, 3, 16, 16), 5, measure=True)
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "huber_loss"]
)
def test_reduced_losses_hold_what_they_hold(loss, reduction):
    function = getattr(nn.functional, loss)
    workload = linear(
        model=lambda: nn.Sequential(nn.Linear(256, 300), nn.Sigmoid()),
        batch=lambda size: (torch.randn(size, 256), torch.rand(size, 300)),
        loss=lambda model, batch: function(model(batch[0]), batch[1], reduction=reduction).sum(),
    )
    found = anatomy(workload, 40, measure=True)
    assert is_right(found)


def test_layers_norm_statistics_are_wide_under_autocast():
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))

    found = anatomy(dataclasses.replace(training(model, 400, 8), autocast=torch.bfloat16), 6, measure=True)
    saved = found.instants["end of forward"]["saved activations"]
    assert saved == found.measured.instants["end of forward"]["saved activations"]


def test_our_operators_are_predicted_by_their_bodies():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = nn.Parameter(torch.randn(40, 16))

        def forward(self, x):
            loc, x = (nn.functional.normalize(tensor, dim=-1) for tensor in (self.loc, x))
            scale = x.new_ones(40, 1)
            return effops.power_spherical_mixture_log_prob(x.new_zeros(40, 1), loc.unsqueeze(1), scale, x, dim=0)

    found = anatomy(training(Model, 16), 3000, measure=True)
    assert is_right(found)


def test_a_generation_is_taken_apart():
    def generate(model, x):
        cache = []
        for _ in range(5):
            x = model(x)
            cache.append(x.clone())
        return torch.stack(cache)

    workload = Workload(lambda: nn.Linear(64, 64), lambda size: torch.randn(size, 64), generate=generate)
    found = anatomy(workload, 10, measure=True)
    result, state = 4 * 10 * 64, found.categories["generation state"]
    # What calls returned, of which the last two are alive together, five copies, and those stacked.
    assert state == result * (1 + 5 + 5)
    assert found.peak_bytes == found.measured.peak_bytes
    assert found.categories["saved activations"] == found.categories["gradients"] == 0


def test_inference_takes_no_gradients():
    found = anatomy(Workload(lambda: nn.Linear(64, 64), lambda size: {"input": torch.randn(size, 64)}), 10)
    assert list(found.instants) == ["after setup", "end of forward", "peak", "end of step"]
    assert found.peak_bytes == 4 * (64 * 65 + 2 * 10 * 64)


def test_states_of_other_optimizers():
    floats = 4 * 257
    for optimizer, states in ((torch.optim.SGD, 0), (lambda p: torch.optim.SGD(p, momentum=0.9), floats)):
        assert anatomy(linear(optimizer=optimizer), 3).categories["optimizer states"] == states


def test_a_result_that_the_model_keeps():
    """It is other as soon as backward has ended, and the table says what that means."""

    class Keeping(nn.Linear):
        def forward(self, x):
            self.result = super().forward(x)
            return self.result

    found = anatomy(
        Workload(
            lambda: Keeping(8, 16),
            lambda size: torch.randn(size, 8),
            lambda model, x: model(x).sum(),
            torch.optim.SGD,
        ),
        5,
    )
    assert found.instants["end of step"]["other"] == 4 * 5 * 16
    assert "\nother: 320 B of aten::addmm, 4 B of aten::sum; outlives the pass that made it" in str(found)

    class Filling(nn.Linear):
        def forward(self, x):
            self.filled = None if hasattr(self, "filled") else torch.zeros(100)
            return super().forward(x)

    left = anatomy(linear(model=lambda: Filling(256, 1)), 5)
    assert left.instants["after setup"]["other"] == 400
    assert "\nother: 400 B of aten::zeros; left by setup or by the step before, until this step releases it" in str(
        left
    )

    def last(model, x):
        model.last = model(x).sum().detach()  # four bytes beside a megabyte
        return model(x).sum()

    wide = Workload(lambda: nn.Linear(512, 512), lambda size: torch.randn(size, 512), last, torch.optim.SGD)
    found = anatomy(wide, 5)
    assert 0 < found.categories["other"] < 1000 < found.peak_bytes / 1000
    assert "\nother" not in str(found)


def test_cuda_keeps_booleans_of_dropout_also_where_it_computes_again():
    def model():
        return nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1))])

    workload = Workload(model, lambda size: torch.randn(size, 32), lambda model, x: model[0](x).sum(), torch.optim.SGD)
    elements = 1000 * 32
    saved = {
        device: anatomy(workload, 1000, device=device).categories["saved activations"] for device in ("cpu", "cuda")
    }
    assert saved["cpu"] - saved["cuda"] == 3 * elements
    again = anatomy(dataclasses.replace(workload, checkpoint=True), 1000, device="cuda")
    kept = {one.nbytes for one in again.timeline.alive(again.timeline.peak_tick)}
    assert elements in kept


def test_cuda_copies_parameters_in_the_optimizer():
    many = {
        "model": lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]),
        "batch": lambda n: torch.randn(n, 64),
    }
    workload = linear(**many, loss=lambda model, x: model(x).sum())
    found = {device: anatomy(workload, 1, device=device) for device in ("cpu", "cuda")}
    weights = found["cpu"].categories["weights"]
    assert (
        found["cpu"].categories["optimizer temporaries"] < weights <= found["cuda"].categories["optimizer temporaries"]
    )
    assert found["cuda"].device_bytes == found["cuda"].peak_bytes + sum(found["cuda"].overheads.values())


def test_no_input_is_left_changed():
    state = torch.get_rng_state()
    anatomy(linear(), 4, measure=True)
    assert torch.equal(torch.get_rng_state(), state)


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.layers(x)[1][0][0])


def test_lstm_of_which_the_last_state_is_used():
    """The other result gets no gradient, of which a rule once took the layout."""
    found = anatomy(training(LastState, 30, 8), 8, measure=True)
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found.differences


def test_copied_layers_are_of_the_same_mode():
    """Parameters that deepcopy made once had another storage in every operator."""

    def model():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)

    assert is_right(anatomy(training(model, 16, 32), 4, measure=True))


@pytest.mark.slow
def test_copied_layers_ask_for_no_address():
    """PyTorch warned, once in a process, that the caller had accessed the data pointer of a FakeTensor."""
    code = """
import torch
from torch import nn
from effops.memory import Workload, anatomy
layer = lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
anatomy(Workload(lambda: nn.TransformerEncoder(layer(), 2), lambda size: torch.randn(size, 4, 8)), 2)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_network_may_be_copied_with_its_buffers():
    """The number of batches that a normalisation has seen is a value, which made a copy fail."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96))
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x):
            for new, old in zip(self.online.parameters(), self.target.parameters()):
                old.mul_(0.9).add_(new.detach(), alpha=0.1)
            snapshot = copy.deepcopy(self.online)
            return self.online(x) * self.target(x) + snapshot(x).detach()

    found = anatomy(training(Averaged, 64), 200, measure=True)
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.003, found.differences  # statistics of 96 features


def test_models_may_be_moved_and_cast():
    def model():
        return nn.Sequential(
            nn.Linear(64, 64).to(torch.float64).to("cpu").float(), nn.Linear(64, 64).bfloat16().float()
        )

    assert anatomy(training(model, 64), 4).categories["weights"] == 4 * 2 * 64 * 65


def test_tensors_that_exist_stay_as_they_are():
    seen, teacher = torch.zeros(()), nn.Linear(256, 1).requires_grad_(False)

    def loss(model, batch):
        seen.add_(1)
        return (model(batch[0]) - teacher(batch[0])).sum()

    assert anatomy(linear(loss=loss), 4).peak_bytes > 0
    assert seen == 0
    teacher.requires_grad_()
    with pytest.raises(ValueError, match="what requires gradients must be made by `model`"):
        anatomy(linear(loss=loss), 4)
    assert teacher.weight.grad is None


def test_a_whole_dataset_is_a_batch():
    data = torch.randn(100, 256)
    workload = linear(batch=lambda size: data[:size], loss=lambda model, x: model(x).sum())
    assert anatomy(workload, 100).peak_bytes > 0
    fours = linear(batch=lambda size: data[:size].view(-1, 4, 256), loss=lambda model, x: model(x).sum())
    assert anatomy(fours, 100).peak_bytes > 0  # though no batch of 99 is possible


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_losses_have_their_elements_twice(loss):
    function = getattr(nn.functional, loss)
    workload = Workload(
        nn.Identity, lambda size: torch.randn(size, 1000), generate=lambda model, x: function(model(x), x)
    )
    assert is_right(anatomy(workload, 8, measure=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_our_attention_takes_what_pytorch_takes(is_causal):
    """On fake tensors it once computed the forward pass again in backward, as for tensors of other libraries."""
    peaks = []
    for attention in (effops.attention, nn.functional.scaled_dot_product_attention):
        workload = Workload(
            lambda: nn.Linear(16, 16),
            lambda size: torch.randn(size, 2, 100, 16),
            lambda model, x, attention=attention: attention(*[model(x)] * 3, is_causal=is_causal).sum(),
            torch.optim.SGD,
        )
        peaks.append(anatomy(workload, 8).peak_bytes)
    assert abs(peaks[0] - peaks[1]) <= 64


def test_the_outermost_lists_are_checkpointed():
    inner = nn.ModuleList([nn.Linear(8, 8)])
    step = Step(
        linear(
            model=lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"own": inner})])}), checkpoint=True
        ),
        1,
    )
    assert "forward" in vars(step.model["layers"][0])
    assert "forward" not in vars(inner[0])


@pytest.mark.parametrize("shape", [(40, 16), (3, 40, 16), (2, 3, 40, 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_cuda(shape, masked):
    def loss(model, x):
        mask = torch.ones(40, 40, dtype=torch.bool) if masked else None
        x = model(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask, dropout_p=0.1).sum()

    workload = Workload(lambda: nn.Linear(16, 16), lambda size: torch.randn(size, *shape[1:]), loss, torch.optim.SGD)
    cpu, cuda = (anatomy(workload, shape[0], device=device).peak_bytes for device in ("cpu", "cuda"))
    assert cuda < cpu - math.prod(shape[:-2]) * 40 * 40  # of all pairs the CPU holds weights and what is dropped


MADE = nn.Linear(256, 1)


class Routed(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": lambda size: (torch.randn(4, 256), torch.randn(4, 1))}, "`batch` must make a batch of the size"),
        ({"model": lambda: nn.Sequential(nn.Linear(256, 1), Routed())}, r"module `1` \(Routed\) must not depend"),
        ({"model": lambda: MADE}, "`weight` exists already"),
        ({"model": lambda: "model"}, "`model` must return a torch.nn.Module; got str"),
        ({"checkpoint": True}, "`checkpoint` must choose modules"),
    ],
)
def test_bad_workloads(change, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        anatomy(linear(**change), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "got `optimizer` alone"),
        ({"optimizer": None}, "got `loss` alone"),
        ({"accumulation_steps": 0}, "`accumulation_steps` must be at least 1"),
        ({"generate": lambda model, batch: None}, "`generate` is for inference"),
    ],
)
def test_workloads_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        linear(**change)


@pytest.mark.parametrize(
    ("options", "message"), [({"device": "tpu"}, "`device`"), ({"device": "cuda", "measure": True}, "`measure`")]
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        anatomy(linear(), 4, **options)
    with pytest.raises(ValueError, match="`batch_size`"):
        anatomy(linear(), 0)


def test_table():
    text = str(anatomy(linear(), 100, measure=True))
    for part in ("weights", "optimizer states", "saved activations", "all tensors", "measured (", "contractions"):
        assert part in text
    text = str(anatomy(linear(), 100, device="cuda"))
    for part in ("context", "allocator", "rounding", "cuBLAS workspace", "device"):
        assert part in text


def test_a_difference_is_named():
    timeline = Timeline([Allocation(100, 0, None, "a"), Allocation(7, 1, None, "b")], [("forward", 0)], 0, 1)
    other = Timeline([Allocation(100, 0, None, "a"), Allocation(9, 1, None, "c")], [("forward", 0)], 0, 1)
    found = effops.memory.Anatomy(1, timeline, measured=effops.memory.Anatomy(1, other))
    assert found.differences == ["measured only: 1 x 9 bytes of c", "predicted only: 1 x 7 bytes of b"]


def test_examples_of_docstrings():
    results = doctest.testmod(workload_module, extraglobs={"effops": effops, "torch": torch})
    assert results.attempted
    assert not results.failed


class Varied(nn.Module):
    """Operators that change, view, list and count, on tensors of which some differ in one respect alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(12))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        halves = x.split(6, dim=-1)
        turned = x.mT.contiguous().mT
        mixed = (
            torch.add(x, turned) + torch.add(x, turned.double()).float() + torch.add(x.clone(), 2) + torch.add(x, 2.5)
        )
        mixed = mixed.relu_().mul_(self.scale).view(-1, 3, 12)
        shorts = (x > 0).to(torch.int16)
        counted = (shorts + 2).sum() + (shorts + 2.0).sum()
        resized = torch.empty(0).resize_(x.numel() * 2).fill_(1.0)
        starts = [row[:4] for row in (torch.rand(2, 12)[1], torch.rand(12))]
        assert [start.storage_offset() for start in starts] == [12, 0]
        others = [torch.empty(7).set_(other) for other in (torch.rand(7), torch.rand(7))]
        pieces = torch.stack([half.square() for half in halves]).flatten(0, 1)[1:].unbind()
        top, index = mixed.flatten(1).topk(2)
        opposite = [torch._neg_view(x) + 0 for _ in range(2)]
        parts = *pieces, *opposite, counted, *starts, *others, resized, top, index.float()
        return sum(part.sum() for part in parts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_remembered_operators_allocate_what_they_did(device, monkeypatch):
    workload = training(Varied, 5, 3, 12)
    remembered = anatomy(workload, 4, device=device)
    monkeypatch.setattr(OperatorCall, "_key", lambda self: None)
    anew = anatomy(workload, 4, device=device)
    assert remembered.timeline == anew.timeline
    assert remembered.operations == anew.operations
