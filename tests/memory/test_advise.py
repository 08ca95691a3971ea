"""Advice on memory: every figure is that of a prediction with the method, and the combination is one that fits."""

import doctest
import importlib
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import effops
from effops.measure import tensors_of
from effops.memory import Workload, advise, anatomy
from effops.memory.advise import sharded_peak_bytes
from effops.memory.optimizers import AdamW8bit
from effops.prediction.operations import CONTRACTION
from effops.prediction.timeline import Allocation, Timeline
from effops.text import format_bytes

WIDTH, DEPTH, BATCH, LENGTH = 16, 2, 8, 256


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
            for _ in range(DEPTH)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SelfAttention(nn.Module):
    def __init__(self, layer=nn.MultiheadAttention):
        super().__init__()
        self.attention = layer(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.projection(x)
        return (x @ x.mT).softmax(-1) @ x


class Branches(Layers):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def workload(model=Layers, *shape, **changes):
    parts = {
        "model": model,
        "batch": lambda size: torch.randn(size, *shape, WIDTH),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": torch.optim.Adam,
    }
    return Workload(**{**parts, **changes})


def by_name(advice):
    return {method.name: method for method in advice.methods}


@pytest.fixture(scope="module")
def advice():
    return advise(workload(), BATCH, devices=4)


@pytest.mark.parametrize(
    ("name", "batch_size", "changes"),
    [
        ("gradient accumulation, 2 x 4", 4, {"accumulation_steps": 2}),
        ("gradient accumulation, 8 x 1", 1, {"accumulation_steps": 8}),
        ("activation checkpointing", BATCH, {"checkpoint": True}),
        ("mixed precision", BATCH, {"autocast": torch.bfloat16}),
        ("batch size 4", 4, {}),
        ("optimizer SGD", BATCH, {"optimizer": torch.optim.SGD}),
        ("optimizer AdamW", BATCH, {"optimizer": torch.optim.AdamW}),
        ("data loading", BATCH, {}),
    ],
)
def test_a_method_takes_what_is_predicted_of_the_step_with_it(advice, name, batch_size, changes):
    assert by_name(advice)[name].peak_bytes == anatomy(workload(**changes), batch_size).peak_bytes


def test_every_published_method_is_there_and_ranked(advice):
    known = {name.split(",")[0] for name in by_name(advice)}
    assert {"gradient accumulation", "activation checkpointing", "mixed precision", "data loading"} < known
    assert {"optimizer SGD", "optimizer AdamW", "optimizer Adafactor", "optimizer AdamW with 8-bit states"} < known
    assert {"ZeRO stage 1", "ZeRO stage 2", "ZeRO stage 3", "batch size 4"} < known
    peaks = [method.peak_bytes for method in advice.methods]
    assert peaks == sorted(peaks)
    assert advice.peak_bytes == anatomy(workload(), BATCH).peak_bytes


def test_operations_are_those_of_a_sample(advice):
    counts = anatomy(workload(), BATCH).operations
    forward, backward = (counts[phase, CONTRACTION] for phase in ("forward", "backward"))
    found = by_name(advice)
    assert found["activation checkpointing"].operations == (2 * forward + backward) / (forward + backward)
    assert found["gradient accumulation, 4 x 2"].operations == found["batch size 4"].operations == 1


def test_zero_divides_what_each_stage_says():
    marked = {"weights": 100, "optimizer states": 80, "gradients": 40, "optimizer temporaries": 8, "inputs": 30}
    allocations = [
        Allocation(nbytes, tick + 1, None, "", category) for tick, (category, nbytes) in enumerate(marked.items())
    ]
    timeline = Timeline(allocations, (("setup", 0), ("forward", 5)), 5, 6)
    peaks = [sharded_peak_bytes(timeline, stage, 4, module_bytes=10, buffer_bytes=20) for stage in (1, 2, 3)]
    assert peaks == [
        100 + 20 + 40 + 2 + 30,
        100 + 20 + (10 + 10) + 2 + 30,
        (20 + 20 + 10) + 20 + (10 + 10) + 2 + 30,
    ]
    assert sharded_peak_bytes(timeline, 3, 1, module_bytes=10, buffer_bytes=20) == sum(marked.values())


def test_zero_keeps_the_largest_module_whole_and_buffers_everywhere():
    class Large(Layers):
        def __init__(self):
            super().__init__()
            self.large = nn.Linear(WIDTH, 1000)
            self.register_buffer("table", torch.zeros(5000))

        def forward(self, x):
            return self.large(super().forward(x))

    timeline = anatomy(workload(Large), 2).timeline
    large, table = 4 * 1000 * (WIDTH + 1), 4 * 5000
    found = by_name(advise(workload(Large), 2, devices=8))["ZeRO stage 3, 8 devices"].peak_bytes
    assert found == sharded_peak_bytes(timeline, 3, 8, large, table) > table + large


def test_states_of_8_bits_are_those_that_bitsandbytes_documents():
    def model():
        return nn.Sequential(nn.Linear(64, 79, bias=False), nn.Linear(79, 64))

    one = workload(model, batch=lambda size: torch.randn(size, 64), optimizer=AdamW8bit)
    large = sum(2 * count + 2 * 4 * -(-count // 256) for count in (64 * 79, 79 * 64))
    assert anatomy(one, 2).categories["optimizer states"] == large + 2 * 4 * 256 + 2 * 4 * 64


def test_predicted_states_of_adafactor_are_the_real_ones():
    model = Layers()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    real = sum(tensor.nbytes for tensor in tensors_of(dict(optimizer.state)))
    assert anatomy(workload(optimizer=torch.optim.Adafactor), 2).categories["optimizer states"] == real


@pytest.mark.slow
def test_layers_of_attention_are_exchanged():
    advice = advise(workload(SelfAttention, LENGTH), 4)
    found = by_name(advice)["effops.nn.MultiheadAttention"]
    exchanged = workload(lambda: SelfAttention(effops.nn.MultiheadAttention), LENGTH)
    assert found.peak_bytes == anatomy(exchanged, 4).peak_bytes < advice.peak_bytes
    assert found.operations is None  # effops' kernels are not counted
    assert "in place of 1 torch.nn.MultiheadAttention" in found.note


def test_softmax_at_the_peak_is_pointed_out():
    found = by_name(advise(workload(Softmax, LENGTH), 4))["effops.attention"]
    assert found.peak_bytes is None
    assert found.note.startswith(f"1 result of softmax: {format_bytes(4 * 4 * LENGTH * LENGTH)} at the peak")
    assert "effops.attention" not in by_name(advise(workload(), 2))


@pytest.mark.slow
def test_a_combination_is_confirmed_and_fits():
    fused = workload(lambda: SelfAttention(effops.nn.MultiheadAttention), LENGTH)
    budget = anatomy(replace(fused, accumulation_steps=2), 2).peak_bytes
    advice = advise(workload(SelfAttention, LENGTH), 4, budget, alternatives={"fused": fused})
    assert advice.fits
    assert next(iter(advice.combination)) == "fused"
    assert advice.combination["fused"] == by_name(advice)["fused"].peak_bytes
    peaks = [advice.peak_bytes, *advice.combination.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] <= budget < peaks[-2]
    assert f"within the budget of {format_bytes(budget)}:" in str(advice)


@pytest.mark.slow
def test_what_alters_the_training_comes_last():
    advice = advise(workload(Layers, LENGTH), 2, 1, probe=False)
    families = [name.split(",")[0].split(" ")[0] for name in advice.combination]
    assert families == ["gradient", "activation", "mixed", "optimizer"]
    assert not advice.fits
    assert "no combination fits the budget of 1 B" in str(advice)


def test_what_rounds_comes_after_what_does_not():
    """Mixed precision was preferred to accumulation, which keeps the results."""

    def chosen(normalisation, budget):
        def model():
            return nn.Sequential(nn.Linear(64, 512), normalisation(512), nn.Linear(512, 1))

        found = advise(workload(model, batch=lambda size: torch.randn(size, 64)), 1024, budget)
        peaks = {method.name: method.peak_bytes for method in found.methods}
        assert (
            max(peaks["mixed precision"], peaks["gradient accumulation, 2 x 512"])
            <= found.budget_bytes
            < found.peak_bytes
        )
        return list(found.combination)

    assert chosen(nn.LayerNorm, "6 MiB") == ["gradient accumulation, 2 x 512"]
    assert chosen(nn.BatchNorm1d, "6 MiB") == ["mixed precision"]  # smaller batches are normalised otherwise


def test_a_combination_has_nothing_to_spare():
    def model():
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))

    one = workload(model, batch=lambda size: torch.randn(size, 256))
    stage = by_name(advise(one, 2, devices=8))["ZeRO stage 2, 8 devices"].peak_bytes
    (name,) = advise(one, 2, stage, devices=8).combination  # accumulation is tried first, and lowers the peak alone
    assert name.startswith("ZeRO")


def test_a_step_that_fits_needs_nothing():
    advice = advise(workload(), 2, "1 GiB")
    assert advice.fits
    assert advice.combination == {}
    assert "the budget of 1.0 GiB holds the step as it is: no method is needed" in str(advice)


@pytest.mark.slow
def test_why_a_method_is_not_in_the_combination():
    """It was not told whether it would not help or was not needed."""
    found = workload(Layers, LENGTH)
    tight = advise(found, 4, 1, probe=False)
    assert not set(tight.combination) & set(tight.left_out)
    applicable = {method.name for method in tight.methods if method.peak_bytes is not None} - {"data loading"}
    assert set(tight.combination) | set(tight.left_out) == applicable
    assert any(reason == "saves nothing beside the others" for reason in tight.left_out.values())
    loose = advise(found, 4, tight.peak_bytes - 1, probe=False)
    (chosen,) = loose.combination
    assert loose.left_out["optimizer SGD"] == "not needed"
    text = str(loose)
    _, _, left_out = text.partition(f"and {chosen}")[2].partition("left out:\n")
    lines = left_out.splitlines()
    assert re.fullmatch("optimizer SGD +not needed", next(line for line in lines if "SGD  " in line))
    assert len(lines) == len(loose.left_out)
    assert max(map(len, lines)) < 100  # a line for each reason, with all names, was 250 long


def test_inference_has_no_methods_of_training():
    found = by_name(advise(workload(loss=None, optimizer=None), 3))
    assert set(found) == {"mixed precision", "batch size 1", "data loading"}


def test_what_cannot_be_applied_says_why():
    odd = by_name(advise(workload(lambda: nn.Linear(WIDTH, 1), autocast=torch.bfloat16), 3))
    assert odd["gradient accumulation"].note == "needs an even batch size"
    assert odd["mixed precision"].note == "is there: torch.bfloat16"
    assert odd["activation checkpointing"].note.startswith("needs a torch.nn.ModuleList")
    assert odd["ZeRO stage 1"].note == "needs more than one of `devices`"
    assert by_name(advise(workload(checkpoint=True), 3))["activation checkpointing"].note == "is there"


def test_an_alternative_that_cannot_be_predicted_says_why():
    found = by_name(advise(workload(), 2, alternatives={"branches": workload(Branches)}))["branches"]
    assert found.peak_bytes is None
    assert found.note.startswith("cannot be predicted: anatomy: module `model` (Branches) must not depend on")


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda(),
        lambda: nn.Sequential(nn.Linear(64, 64, device="cuda"), nn.ReLU(), nn.Linear(64, 1).to("cuda:0")),
    ],
)
def test_models_that_are_moved_to_cuda(model):
    """The model alone, whose parameters ZeRO divides, was built without the device that is predicted."""
    workload = Workload(model, lambda size: torch.randn(size, 64, device="cuda"))
    elsewhere = Workload(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), lambda size: torch.randn(size, 64)
    )
    found, expected = (advise(one, 8, devices=2, device="cuda") for one in (workload, elsewhere))
    assert [one.name for one in found.methods] == [one.name for one in expected.methods]
    assert [one.peak_bytes for one in found.methods] == [one.peak_bytes for one in expected.methods]


def test_too_few_devices_are_an_error():
    with pytest.raises(ValueError, match="`devices` must be at least 1; got 0"):
        advise(workload(), 2, devices=0)


def test_examples():
    module = importlib.import_module("effops.memory.advise")  # the package has the function by that name
    results = doctest.testmod(module, extraglobs={"effops": effops, "torch": torch})
    assert results.attempted
    assert not results.failed
