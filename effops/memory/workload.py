"""A training or inference step that can be run as it is, or on fake tensors."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as checkpointed

from effops.measure import tensors_of
from effops.memory.checked import AUTOCAST_DTYPES, check_count
from effops.pytorch.calls import tree_leaves
from effops.text import frames_of, line_of_program, tells_wrong_arguments, text_of

# These can be raised again with another text. Subclasses of them may take other arguments than a text.
TOLD_WITH_CALL = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)
SIGNATURES = {
    "model()": "model=lambda: torch.nn.Linear(256, 1)",
    "batch(batch_size)": "batch=lambda batch_size: torch.randn(batch_size, 256)",
    "loss(model, batch)": "loss=lambda model, batch: model(batch).mean()",
    "generate(model, batch)": "generate=lambda model, batch: model.generate(batch)",
    "optimizer(model.parameters())": "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
}
Checkpoint = bool | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


@dataclass(frozen=True)
class Workload:
    """What one step runs. With `loss` and `optimizer` it is a training step, else inference without gradients.

    Attributes:
        model: builds the model, anew at each call
        batch: makes a batch of a given size: a tensor, or a tuple or mapping of arguments; tensors that it
            puts into dataclasses are seen too
        loss: computes a scalar from the model and a batch
        optimizer: makes the optimizer of the model's parameters
        autocast: the dtype of `torch.autocast` around model and loss, torch.bfloat16 or torch.float16; None for none
        checkpoint: the modules whose activations are computed again in backward: a class or several, a predicate of a
            module, or True for each module in an outermost `torch.nn.ModuleList`
        accumulation_steps: how many batches, of the given size each, make one optimizer step
        generate: what inference runs with the model and a batch, instead of one call of the model

    Example:
        >>> workload = effops.memory.Workload(
        ...     model=lambda: torch.nn.Linear(256, 1),
        ...     batch=lambda size: (torch.randn(size, 256), torch.randn(size, 1)),
        ...     loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        ...     optimizer=torch.optim.Adam,
        ... )
        >>> effops.memory.anatomy(workload, 512).peak_bytes
        535576
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    autocast: torch.dtype | None = None
    checkpoint: Checkpoint = None
    accumulation_steps: int = 1
    generate: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        self._check_functions()
        if (self.loss is None) != (self.optimizer is None):
            given, missing = ("loss", "optimizer") if self.optimizer is None else ("optimizer", "loss")
            raise ValueError(
                f"Workload: `loss` and `optimizer` must be given together; got `{given}` alone; give `{missing}` too "
                "to train, or neither for inference"
            )
        if self.generate is not None and self.loss is not None:
            raise ValueError("Workload: `generate` is for inference; got `loss` too; leave one out")
        check_count("Workload", "accumulation_steps", self.accumulation_steps, "leave it out for 1")
        if self.accumulation_steps > 1 and self.loss is None:
            raise ValueError(
                f"Workload: `accumulation_steps` must be 1 for inference; got {self.accumulation_steps}; leave it out"
            )

    def _check_functions(self) -> None:
        """Raise where what a function makes is given instead of the function."""
        made = {
            "model": (
                isinstance(self.model, nn.Module) or not callable(self.model),
                "builds it, so that each step starts anew",
                SIGNATURES["model()"] if not isinstance(self.model, nn.Module) else "model=lambda: {}(...)",
            ),
            "batch": (
                not callable(self.batch),
                "makes a batch of a given size",
                "batch=lambda size: torch.randn(size, 256)",
            ),
            "loss": (
                _is_loss_of_pytorch(self.loss) or (self.loss is not None and not callable(self.loss)),
                "computes it from the model and a batch",
                "loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])",
            ),
            "optimizer": (
                self.optimizer is not None and not callable(self.optimizer),
                "makes it of the model's parameters",
                "optimizer=torch.optim.Adam, or functools.partial of it with its settings",
            ),
            "generate": (
                self.generate is not None and not callable(self.generate),
                "runs inference with the model and a batch",
                SIGNATURES["generate(model, batch)"],
            ),
        }
        for argument, (is_made, purpose, remedy) in made.items():
            if is_made:
                got = type(getattr(self, argument)).__name__
                raise TypeError(
                    f"Workload: `{argument}` must be a function that {purpose}; got an object of class {got}; "
                    f"give {remedy.format(got)}"
                )
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype):
            raise TypeError(
                f"Workload: `autocast` must be a dtype; got {self.autocast!r}; give torch.bfloat16 or torch.float16"
            )
        if self.autocast not in (None, *AUTOCAST_DTYPES):
            raise ValueError(
                f"Workload: `autocast` must be torch.bfloat16 or torch.float16; got {self.autocast}, for which PyTorch "
                "switches autocast off; give torch.bfloat16, or None for a step without autocast"
            )
        chosen = self.checkpoint if isinstance(self.checkpoint, tuple) else (self.checkpoint,)
        if not all(one is None or isinstance(one, bool) or callable(one) for one in chosen):
            raise TypeError(
                f"Workload: `checkpoint` must be classes of modules, a function of a module, or True; got "
                f"{self.checkpoint!r}; give the class itself, as torch.nn.Linear"
            )

    @property
    def trains(self) -> bool:
        return self.loss is not None

    @property
    def checkpoints(self) -> Callable[[nn.Module], bool]:
        """Whether the activations of a module are computed again."""
        chosen = self.checkpoint
        if isinstance(chosen, (type, tuple)):
            return lambda module: isinstance(module, chosen)
        if callable(chosen):
            return chosen
        return lambda module: False


Workload.__init__ = tells_wrong_arguments(Workload.__init__)  # type: ignore[method-assign]


def check_step(function: str, workload: Any, batch_size: Any = 1) -> None:
    """Raise unless these are a workload and the size of a batch."""
    if not isinstance(workload, Workload):
        raise TypeError(
            f"{function}: `workload` must be an effops.memory.Workload; got {type(workload).__name__}; give "
            "Workload(model=lambda: ..., batch=lambda size: ...)"
        )
    check_count(function, "batch_size", batch_size)


class Step:
    """A model, ready for any number of steps.

    Between calls of `run` the model stays, with the states of its optimizer and what modules keep by themselves.

    Args:
        workload, batch_size: as in `anatomy`
        enter: is told of each phase that begins, of `effops.prediction.timeline.PHASES`
        mark: is told a category, and tensors whose storages belong to it
    """

    def __init__(
        self,
        workload: Workload,
        batch_size: int,
        enter: Callable[[str], None] = lambda phase: None,
        mark: Callable[[str, Iterable[Tensor]], None] = lambda category, found: None,
    ) -> None:
        self.workload, self.batch_size, self.enter, self.mark = workload, batch_size, enter, mark
        enter("setup")
        with called_as("model()"):
            self.model = workload.model()
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"Workload: `model` must return a torch.nn.Module; got {type(self.model).__name__}")
        self.model.train(workload.trains)
        mark("weights", self.model.parameters())
        mark("weights", self.model.buffers())
        self._checkpoint()
        self.optimizer = None
        if workload.optimizer:
            with called_as("optimizer(model.parameters())"):
                self.optimizer = workload.optimizer(self.model.parameters())
        closure = inspect.signature(self.optimizer.step).parameters.get("closure") if self.optimizer else None
        if closure and closure.default is inspect.Parameter.empty:
            raise ValueError(
                "Workload: `optimizer` must step without a closure, once a backward pass; got "
                f"{type(self.optimizer).__name__}; choose another one"
            )

    def _checkpoint(self) -> None:
        chosen = self.workload.checkpoint
        modules = self.model.modules()
        found = list(_listed_modules(self.model) if chosen is True else filter(self.workload.checkpoints, modules))
        if chosen and not found:
            raise ValueError(
                "Workload: `checkpoint` must choose modules of the model; got "
                f"{chosen!r}, which chooses none of {type(self.model).__name__}"
            )
        for module in found:
            module.forward = functools.partial(checkpointed, module.forward, use_reentrant=False)

    def run(self, batches: int | None = None) -> None:
        """Run one step, of `Workload.accumulation_steps` batches or as many as given.

        After a step of one batch, all that steps leave behind is there.
        """
        if self.workload.trains:
            self._train(batches or self.workload.accumulation_steps)
        else:
            self._infer()

    @torch.enable_grad()
    def _train(self, batches: int) -> None:
        assert self.workload.loss is not None
        assert self.optimizer is not None
        for _ in range(batches):
            batch = self._batch()
            self.enter("forward")
            with self._autocast(), called_as("loss(model, batch)"):
                loss = self.workload.loss(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got, remedy = type(loss).__name__, "return the tensor itself, without .item()"
                if isinstance(loss, Tensor):
                    got, remedy = f"shape {tuple(loss.shape)}", "take its .mean() or .sum()"
                raise TypeError(f"Workload: `loss` must return a scalar tensor; got {got}; {remedy}")
            if not loss.requires_grad:
                raise ValueError(
                    "Workload: `loss` must have gradients by the model's parameters; got a tensor that requires none; "
                    "compute it without .detach(), .item() and no_grad, of a model with parameters to train"
                )
            self.enter("backward")
            with called_as("loss(model, batch).backward()"):
                torch.autograd.backward(loss / batches if batches > 1 else loss)
        gradients = (parameter.grad for parameter in self.model.parameters())
        self.mark("gradients", (gradient for gradient in gradients if gradient is not None))
        self.enter("optimizer")
        self.optimizer.step()
        self.mark("optimizer states", tensors_of(dict(self.optimizer.state)))
        self.enter("release")
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _infer(self) -> None:
        batch = self._batch()
        self.enter("between")
        with (
            self._autocast(),
            self.model.register_forward_pre_hook(lambda module, arguments: self.enter("forward")),
            self.model.register_forward_hook(lambda module, arguments, result: self.enter("between")),
        ):
            result = self._inferred(batch)
        self.enter("release")
        del result

    def _inferred(self, batch: Any) -> Any:
        if self.workload.generate is not None:
            with called_as("generate(model, batch)"):
                return self.workload.generate(self.model, batch)
        if isinstance(batch, Mapping):
            with called_as("model()(**batch)"):
                return self.model(**batch)
        if isinstance(batch, (tuple, list)):
            with called_as("model()(*batch)"):
                return self.model(*batch)
        with called_as("model()(batch)"):
            return self.model(batch)

    def _batch(self) -> Any:
        self.enter("inputs")
        with called_as("batch(batch_size)"):
            batch = self.workload.batch(self.batch_size)
        if any(type(leaf).__module__ == "numpy" for leaf in tree_leaves(batch)):
            raise TypeError("Workload: `batch` must make tensors; got an array of numpy; use torch.from_numpy")
        self.mark("inputs", tensors_of(batch))
        return batch

    def _autocast(self) -> torch.autocast:
        dtype = self.workload.autocast
        return torch.autocast(torch.get_default_device().type, dtype=dtype, enabled=dtype is not None)


@contextmanager
def called_as(call: str) -> Iterator[None]:
    """Say in an error how a function of a workload is called, and in which line of the program it went wrong."""
    try:
        yield
    except TOLD_WITH_CALL as error:
        if type(error) not in TOLD_WITH_CALL or str(error).startswith(("Workload: ", "anatomy: ")):
            raise
        place = line_of_program(frames_of(error))
        takes_others = isinstance(error, TypeError) and "positional argument" in str(error)
        hint = f"; it is called as {call}: write {SIGNATURES[call]}" if takes_others and call in SIGNATURES else ""
        told = f"Workload: {call} raised {type(error).__name__}{f' {place}' if place else ''}: {text_of(error)}{hint}"
        raise type(error)(told) from error


def _is_loss_of_pytorch(loss: Any) -> bool:
    """Whether this takes predictions and targets, where a workload's loss takes the model and a batch."""
    places = nn.functional.__name__, nn.modules.loss.__name__
    return getattr(loss, "__module__", None) in places


def _listed_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost lists."""
    if isinstance(module, nn.ModuleList):
        yield from module
    else:
        for child in module.children():
            yield from _listed_modules(child)
