"""What people get wrong about workloads and budgets, and the answers that they get."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import effops
import effops_pytest
from effops.commands import main as cli
from effops.memory import (
    Workload,
    advise,
    anatomy,
    estimate_transformer,
    max_batch_size,
    parse_bytes,
    plot_anatomy,
    summarize,
    sweep,
)
from effops.memory.formula import Details
from effops.memory.models import Configuration, bert_large, workload_parts

LAYER = nn.Linear(3, 3)
WORKLOAD = Workload(lambda: nn.Linear(64, 1), lambda size: torch.randn(size, 64))


@pytest.mark.parametrize(
    ("amount", "nbytes"),
    [
        ("6G", 6 * 2**30),
        ("6 GiB", 6 * 2**30),
        ("6GB", 6 * 10**9),
        ("6g", 6 * 2**30),
        ("1.5 kB", 1500),
        ("2K", 2048),
        ("3MiB", 3 * 2**20),
        ("1T", 2**40),
        (".5M", 2**19),
        ("7 B", 7),
        ("6e9 B", 6 * 10**9),
        ("0", 0),
        (6e9, 6 * 10**9),
        (7, 7),
        (torch.tensor(7).numpy()[()], 7),
    ],
)
def test_amounts_of_bytes(amount, nbytes):
    assert parse_bytes(amount) == nbytes


@pytest.mark.parametrize("amount", ["", "-", "6 gigs", "- 6G", "6 iB", "6 G B", math.inf, math.nan, True, [6]])
def test_no_amounts_of_bytes(amount):
    with pytest.raises(ValueError, match=r"parse_bytes: expected a number and B, KB.* K, M, G or T .* got "):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", ["-6G", "-1MiB", "-1", -1, -0.5, -math.inf])
def test_amounts_below_0_are_told_so(amount):
    """They were told which units there are."""
    with pytest.raises(ValueError, match=r"^parse_bytes: expected at least 0 bytes; got .*; write it without the sign"):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("amount", "remedy"),
    [
        ("64", r'write "64MiB", or "64B" for bytes \(in Python also 64 as a number\)'),
        (" .5 ", r'write ".5MiB", or ".5B" for bytes'),
        ("6e9", r'write "6e9B" for bytes \(in Python also 6e9 as a number\)'),
    ],
)
def test_a_text_of_a_number_alone_is_no_amount(amount, remedy):
    """A budget of "64" meant 64 bytes."""
    with pytest.raises(ValueError, match=rf"^parse_bytes: expected a unit behind the number; got '{amount}'; {remedy}"):
        parse_bytes(amount)


def test_budgets():
    """All functions read them alike, and an error names the function and the argument."""
    assert max_batch_size(WORKLOAD, "1M") == max_batch_size(WORKLOAD, "1 MiB") == max_batch_size(WORKLOAD, 2.0**20)
    for name, function in {
        "max_batch_size": lambda: max_batch_size(WORKLOAD, "6 gigs"),
        "advise": lambda: advise(WORKLOAD, 1, "6 gigs"),
        "sweep": lambda: sweep(lambda width: WORKLOAD, {"width": [1]}, "6 gigs"),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: `budget`: expected a number and B.* got '6 gigs'"):
            function()
    with pytest.raises(ValueError, match=r"^budget: `limit`: expected a unit .* got '64'; write \"64MiB\", or \"64B\""):
        effops.budget("64")
    for name, function in {
        "max_batch_size: `budget`": lambda: max_batch_size(WORKLOAD, "6"),
        "advise: `budget`": lambda: advise(WORKLOAD, 1, "6"),
        "sweep: `budget`": lambda: sweep(lambda width: WORKLOAD, {"width": [1]}, "6"),
        "memory_budget: `limit`": lambda: effops_pytest.check("6", abs, LAYER.weight),
        "lint: `least`": lambda: effops.lint(abs, LAYER.weight, least="6"),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected a unit behind the number; got '6'"):
            function()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workload(modle=LAYER), r'Workload: it takes model, .*; got `modle`; did you mean "model"\?'),
        (lambda: Workload(LAYER), "Workload: it takes .*; got no `batch`; give each of these"),
        (lambda: advise(WORKLOAD), "advise: it takes workload, batch_size, .*; got no `batch_size`"),
        (lambda: anatomy(WORKLOAD, batchsize=1), r'anatomy: it takes .*; did you mean "batch_size"\?'),
        (lambda: max_batch_size(WORKLOAD, budgt="1G"), r'max_batch_size: it takes .*; did you mean "budget"\?'),
        (lambda: sweep(WORKLOAD), "sweep: it takes .*; got no `axes`"),
        (lambda: estimate_transformer(1), "estimate_transformer: it takes blocks, .*; got no `heads` and no"),
    ],
)
def test_arguments_that_are_not_taken(call, message):
    """The texts were Python's."""
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def test_the_name_of_a_class_is_no_class():
    """It was said to choose none of the modules, of which it named one."""
    with pytest.raises(TypeError, match=r"`checkpoint` must be classes .* got 'Linear'; give the class itself"):
        dataclasses.replace(WORKLOAD, checkpoint="Linear")


def test_a_budget_without_its_unit():
    """It was told to be raised."""
    with pytest.raises(ValueError, match='got 6 B; a number alone is bytes: give a unit too, as "6G"'):
        max_batch_size(WORKLOAD, 6)
    wide = Workload(lambda: nn.Linear(640, 1), lambda size: torch.randn(size, 640))
    with pytest.raises(ValueError, match=r"got 1\.0 KiB; raise it"):  # whose remedy was "1025G"
        max_batch_size(wide, 1025)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": LAYER}, "`model` must be a function that builds it, .* class Linear; give model=lambda: Linear"),
        ({"batch": torch.zeros(4, 3)}, "`batch` must be a function that makes a batch of a given size; got .*Tensor"),
        ({"loss": nn.MSELoss()}, r"`loss` must be a function that .* got .* MSELoss; give loss=lambda model, batch: "),
        ({"loss": nn.functional.mse_loss}, r"`loss` must be a function that computes it from the model and a batch"),
        ({"optimizer": "adam"}, r"`optimizer` must be a function that .* class str; give optimizer=torch\.optim\.Adam"),
        ({"model": None}, "`model` must be a function that builds it, .* class NoneType; give model=lambda: torch"),
        ({"loss": 3}, "`loss` must be a function that computes it .* class int; give loss=lambda model, batch"),
        (
            {"loss": None, "optimizer": None, "generate": "x"},
            "`generate` must be a function that runs inference .* class str; give generate=lambda model, batch",
        ),
        ({"autocast": "bfloat16"}, "`autocast` must be a dtype; got 'bfloat16'; give torch.bfloat16"),
        (
            {"optimizer": torch.optim.Adam(LAYER.parameters())},
            "`optimizer` must be a function that .* class Adam; give optimizer=torch.optim.Adam",
        ),
    ],
)
def test_what_a_function_makes_is_no_function(given, message):
    parts = {"model": lambda: LAYER, "batch": lambda size: torch.zeros(size, 3)}
    training = {"loss": lambda model, batch: model(batch).sum(), "optimizer": torch.optim.SGD}
    with pytest.raises(TypeError, match=f"Workload: {message}"):
        Workload(**{**parts, **training, **given})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: anatomy(LAYER, 2),
            TypeError,
            "anatomy: `workload` must be an effops.memory.Workload; got Linear; give",
        ),
        (lambda: max_batch_size(LAYER, "6G"), TypeError, "max_batch_size: `workload` must be an .*; got Linear; give"),
        (lambda: advise(LAYER, 2), TypeError, "advise: `workload` must be an .*; got Linear; give"),
        (lambda: anatomy(WORKLOAD, "2"), TypeError, "anatomy: `batch_size` must be an integer; got str '2'; convert"),
        (lambda: advise(WORKLOAD, None, "6G"), TypeError, "must be an integer; got NoneType None; give one"),
        (lambda: anatomy(WORKLOAD, 2.5), TypeError, "must be an integer; got float 2.5; give a whole number, as 2"),
        (lambda: anatomy(WORKLOAD, 1, device="mps"), ValueError, "got 'mps'; give one of these, since what other dev"),
        (lambda: anatomy(WORKLOAD, 1, device="cud"), ValueError, 'got .cud.; did you mean "cuda"'),
        (lambda: max_batch_size(WORKLOAD, "6G", mode="prob"), ValueError, 'got .prob.; did you mean "probe"'),
        (lambda: max_batch_size(WORKLOAD, "6G", budget_means="devices"), ValueError, 'did you mean "device"'),
        (lambda: Configuration(attention="fusd"), ValueError, 'got .fusd.; did you mean "fused"'),
        (lambda: workload_parts("encoder_only"), ValueError, 'got .encoder_only.; did you mean "encoder_only_tst"'),
        (
            lambda: bert_large(attention="spda"),
            ValueError,
            'one of eager, sdpa; got .spda.; did you mean "sdpa"',
        ),
        (lambda: Details(optimizer="adamm"), ValueError, 'got .adamm.; did you mean "adam'),
        (
            lambda: estimate_transformer(1, 1, 1, 1, 1, formula="detail"),
            ValueError,
            'got .detail.; did you mean "detailed"',
        ),
        (
            lambda: sweep(lambda width: WORKLOAD, {"width": [4]}, "6G", base={"widht": 4}),
            ValueError,
            'got widht; did you mean "width"',
        ),
        (lambda: anatomy(WORKLOAD, 0), ValueError, "anatomy: `batch_size` must be at least 1; got 0"),
        (lambda: sweep(lambda width: WORKLOAD, {"width": 4}, "6G"), ValueError, "each with values; .* give lists"),
        (
            lambda: max_batch_size(WORKLOAD, "1G", multiple_of="8"),
            TypeError,
            "`multiple_of` must be an integer; got str",
        ),
        (lambda: max_batch_size(WORKLOAD, "1G", multiple_of=2.5), TypeError, "must be an integer; got float 2.5; give"),
        (
            lambda: max_batch_size(WORKLOAD, "1G", power_of_two="no"),
            TypeError,
            "True or False; got str 'no'; give False",
        ),
        (lambda: max_batch_size(WORKLOAD, "1G", device="gpu"), ValueError, "max_batch_size: `device` must be"),
        (lambda: anatomy(WORKLOAD, 1, measure="yes"), TypeError, "anatomy: `measure` must be True or False; got str"),
        (
            lambda: anatomy(WORKLOAD, 1, probe=1),
            TypeError,
            "anatomy: `probe` must be True or False; got int 1; give True",
        ),
        (lambda: anatomy(WORKLOAD, 1, context_bytes="1 gig"), ValueError, "`context_bytes`: expected a number and"),
        (lambda: advise(WORKLOAD, 1, devices="2"), TypeError, "advise: `devices` must be an integer; got str '2'"),
        (
            lambda: sweep(lambda w: WORKLOAD, {"w": [4]}, batch_size="4"),
            TypeError,
            "sweep: `batch_size` must be an int",
        ),
        (lambda: sweep(lambda w: WORKLOAD, {"w": [4]}, "6G", power_of_two="no"), TypeError, "True or False"),
        (lambda: sweep(WORKLOAD, {"w": [4]}, "6G"), TypeError, "`workload_of` must be a function .*; give lambda w: W"),
        (
            lambda: estimate_transformer(8, 8, 64, "4", 128),
            TypeError,
            "`batch` must be an integer; got str '4'; convert",
        ),
        (
            lambda: estimate_transformer(8, 8, 64, 4, 128, "float32"),
            TypeError,
            "`dtype` must be a dtype; got 'float32'",
        ),
        (lambda: Details(dropout="no"), TypeError, "Details: `dropout` must be True or False"),
        (lambda: Details(d_ff="4"), TypeError, "Details: `d_ff` must be an integer"),
        (lambda: Configuration(layers="two"), TypeError, "Configuration: `layers` must be an integer; got str 'two'"),
        (lambda: Configuration(dropout="no"), TypeError, "Configuration: `dropout` must be a number; got str"),
        (lambda: dataclasses.replace(WORKLOAD, accumulation_steps="2"), TypeError, "`accumulation_steps` must be an"),
        (
            lambda: summarize({"train_runtime": "x", "train_samples_per_second": 1}),
            TypeError,
            "summarize: `train_runtime` must be a number; got str 'x'",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32, torch.complex64])
def test_a_dtype_that_autocast_does_not_take(dtype):
    """The step was predicted without autocast, and PyTorch alone warned."""
    with pytest.raises(
        ValueError, match=rf"^Workload: `autocast` must be .*; got {dtype}, .*; give torch.bfloat16, or"
    ):
        dataclasses.replace(WORKLOAD, autocast=dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([WORKLOAD], "`alternatives` must be workloads by name; got list; give a dict of names and workloads"),
        ({1: WORKLOAD}, "names of `alternatives` must be texts; got 1; give a dict"),
        ({"m": LAYER}, r"`alternatives\['m'\]`: `workload` must be an effops.memory.Workload; got Linear; give"),
    ],
)
def test_alternatives_that_are_none(given, message):
    """They were errors from inside, of attributes."""
    with pytest.raises(TypeError, match=f"^advise: {message}"):
        advise(WORKLOAD, 2, alternatives=given)


@pytest.mark.parametrize(
    ("workload_of", "given", "message"),
    [
        (
            lambda width: WORKLOAD,
            {},
            r'must be a function of the axes: it takes width; got `wdth`; did you mean "width"\?',
        ),
        (
            lambda wdth, depth: WORKLOAD,
            {},
            "it takes wdth, depth; got no `depth`; give each of these; give lambda wdth",
        ),
        (lambda wdth: LAYER, {}, "`workload_of` must return a Workload; got Linear; give lambda wdth: Workload"),
        (lambda wdth: WORKLOAD, {"axes": {1: [1]}}, r"`axes` must be lists of values by name; got 1: \[1\]; give"),
        (lambda wdth: WORKLOAD, {"axes": {"wdth": "12"}}, "`axes` must be lists of values by name; got 'wdth': '12'"),
        (lambda wdth: WORKLOAD, {"axes": {"wdth": [[1]]}}, r"values of `axes` must be hashable, .*got \[1\] for wdth"),
        (lambda wdth: WORKLOAD, {"base": [1]}, "`base` must be a dict of a value for each axis; got list; give"),
    ],
)
def test_sweeps_that_cannot_be(workload_of, given, message):
    """They were errors of the function, of the cache of results and of dict()."""
    with pytest.raises(TypeError, match=f"^sweep: .*{message}"):
        sweep(workload_of, **{"axes": {"wdth": [1]}, "budget": "1 MiB", **given})


@pytest.mark.parametrize(
    "call",
    [
        lambda: max_batch_size(WORKLOAD, "1G", progress=True),
        lambda: advise(WORKLOAD, 2, progress=True),
        lambda: sweep(lambda width: WORKLOAD, {"width": [1]}, "1G", progress=True),
    ],
)
def test_progress_that_is_no_function(call):
    with pytest.raises(TypeError, match="`progress` must be a function of a text; got bool; give one, as print"):
        call()


def test_pictures_that_cannot_be_drawn(tmp_path):
    """They were errors from inside, and Pillow's of a file."""
    found = anatomy(WORKLOAD, 2)
    swept = sweep(lambda width: WORKLOAD, {"width": [1]}, batch_size=2)
    for given in (max_batch_size(WORKLOAD, "1 MiB"), WORKLOAD):
        with pytest.raises(
            TypeError, match=rf"^plot_anatomy: `anatomy` must be an Anatomy; got {type(given).__name__}; "
        ):
            plot_anatomy(given, tmp_path / "step.png")
    for name, draw in {"plot_anatomy": lambda path: plot_anatomy(found, path), "Sweep.plot": swept.plot}.items():
        with pytest.raises(
            FileNotFoundError, match=rf"^{name}: `path` must be in a folder that exists; .*; make '.*no' "
        ):
            draw(tmp_path / "no" / "step.png")
        with pytest.raises(TypeError, match=rf"^{name}: `path` must be a path; got NoneType None; give one, as"):
            draw(None)


@pytest.mark.parametrize(
    ("reduce", "got"),
    [
        (torch.square, r"shape \(4, 3\); take its \.mean\(\) or"),
        (lambda result: 1.0, r"float; return the tensor itself, without \.item\(\)"),
    ],
)
def test_a_loss_that_is_no_scalar(reduce, got):
    workload = Workload(
        lambda: nn.Linear(3, 3),
        lambda size: torch.zeros(size, 3),
        loss=lambda model, batch: reduce(model(batch)),
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(TypeError, match=f"Workload: `loss` must return a scalar tensor; got {got}"):
        anatomy(workload, 4)


def training(loss):
    return Workload(lambda: nn.Linear(3, 1), lambda size: torch.zeros(size, 3), loss, torch.optim.SGD)


READERS = {
    "numpy": (lambda found: found.detach().numpy().sum(), r"Tensor\.numpy\(\)"),
    "item": (lambda found: found.sum().item(), r"aten\._local_scalar_dense\.default, as of \.item\(\)"),
    "mask": (
        lambda found: found[found > 0].sum(),
        r"aten\.nonzero\.default, as of torch\.nonzero, or of a boolean mask",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_the_line_that_reads_values(name):
    """It named neither the operator of numpy nor a line."""
    read, operator = READERS[name]
    line = read.__code__.co_firstlineno
    with pytest.raises(
        NotImplementedError, match=rf"got .*{operator}.* in .*test_mistakes\.py, line {line}; make shapes"
    ):
        anatomy(training(lambda model, batch: read(model(batch))), 2)


def test_shapes_that_do_not_fit(caplog):
    """PyTorch logged its own traceback of the operator too."""
    with pytest.raises(
        RuntimeError, match=r"Workload: loss\(model, batch\) raised RuntimeError in .*py, line \d+: a and b"
    ):
        anatomy(training(lambda model, batch: model(batch) @ torch.ones(5, 7)), 2)
    assert not caplog.records


def test_a_loss_without_gradients():
    with pytest.raises(ValueError, match=r"`loss` must have gradients by the model's parameters; got .* \.detach\(\)"):
        anatomy(training(lambda model, batch: model(batch).detach().sum()), 2)


def test_a_workload_named_by_its_file(capsys):
    assert cli.main(["memory", "anatomy", "--workload", "train.py:workload", "--batch-size", "2"]) == 2
    assert "got 'train.py:workload': No module named 'train'; write it as an import" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "error", "answer"),
    [
        (
            {"batch": lambda: torch.zeros(2, 3)},
            TypeError,
            r"Workload: batch\(batch_size\) raised TypeError: .*0 positional",
        ),
        (
            {"loss": lambda batch, model: model(batch).sum()},
            TypeError,
            r"Workload: loss\(model, batch\) raised [A-Za-z]+ in .*test_mistakes.py, line \d+: .*Tensor",
        ),
        (
            {"optimizer": lambda model: torch.optim.SGD(model.parameters())},
            AttributeError,
            r"Workload: optimizer\(model\.parameters\(\)\) raised [A-Za-z]+ in .*es.py, line \d+: .*generator",
        ),
    ],
    ids=["batch", "loss", "optimizer"],
)
def test_functions_that_take_other_arguments(given, error, answer):
    """The answer says what they are called with."""
    parts = {
        "model": lambda: nn.Linear(3, 3),
        "batch": lambda size: torch.zeros(size, 3),
        "loss": lambda model, batch: model(batch).sum(),
        "optimizer": torch.optim.SGD,
    }
    with pytest.raises(error, match=answer):
        anatomy(Workload(**{**parts, **given}), 2)
