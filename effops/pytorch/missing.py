"""Stand-ins for interfaces that the installed PyTorch lacks: they raise where they are used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

# All default tests passed with these, on each CPython that docs/versions.md lists.
TESTED = "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"
T = TypeVar("T")


class MissingInterfaceError(NotImplementedError):
    """A feature needs an interface that the installed PyTorch lacks."""


class Lacking(NamedTuple):
    """An interface that the installed PyTorch lacks, and the feature that needs it."""

    feature: str
    interface: str

    def __str__(self) -> str:
        return f"{self.feature} need {self.interface}, which torch {torch.__version__} lacks"

    @property
    def error(self) -> MissingInterfaceError:
        return MissingInterfaceError(f"{self}; {tested()}; install a torch that has it")


PREDICTIONS, IN_TILES = "predictions of memory", "tiles"
LACKING: list[Lacking] = []


def obstacle(feature: str) -> str:
    """Why a feature cannot run: an interface that the installed PyTorch lacks; empty if it has all."""
    return next((str(one) for one in LACKING if one.feature == feature), "")


def is_tested() -> bool:
    """Whether effops was tested with the installed PyTorch."""
    return torch.__version__.partition("+")[0] in TESTED


def tested() -> str:
    """Which versions of torch effops was tested with, and whether the installed one is among them."""
    versions = f"effops was tested with torch {', '.join(TESTED)}"
    return versions if is_tested() else f"{versions}, not with {torch.__version__}"


class _Raising(type):
    """The class of a stand-in, whose instances nobody can make or ask for."""

    lacking: Lacking

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise cls.lacking.error

    def __instancecheck__(cls, instance: Any) -> NoReturn:
        raise cls.lacking.error

    def __subclasscheck__(cls, subclass: type) -> NoReturn:
        raise cls.lacking.error

    def __getattr__(cls, name: str) -> NoReturn:
        raise cls.lacking.error


def stand_in(feature: str, interface: str) -> Any:
    """A class in place of a function, class, module or exception. Uses of it raise; classes may derive from it."""
    lacking = Lacking(feature, interface)
    if lacking not in LACKING:
        LACKING.append(lacking)
    # An exception, so that `except` may name it. No exception of PyTorch is one.
    return _Raising(interface, (Exception,), {"lacking": lacking})


def present(interface: T) -> T:
    """The interface, for what compares it or hands it on, which a stand-in cannot notice. Raises if it is missing."""
    if isinstance(interface, _Raising):
        raise interface.lacking.error
    return interface


def getter(owner: Any, name: str) -> Callable[[Any], Any]:
    """The function that reads the attribute of a given name, which `owner` has as all objects of its kind have."""
    getattr(owner, name)
    return attrgetter(name)


def caller(owner: Any, name: str) -> Callable[[Any], Any]:
    """The function that calls the method of a given name, which subclasses of `owner` may override."""
    getattr(owner, name)
    return methodcaller(name)


def reader(owner: Any, name: str) -> Callable[[], Any]:
    """The function that reads an attribute of a module, which changes."""
    getattr(owner, name)

    def read() -> Any:
        return getattr(owner, name)

    return read


def take_apart(module: str, feature: str) -> None:
    """Import the interfaces of a module one by one, after its own `try` has failed; put stand-ins for missing ones."""
    namespace = vars(sys.modules[module])
    loader: Any = sys.modules[module].__loader__
    full_names: dict[str, str] = {}
    for statement in interfaces_of(loader.get_source(module)):
        target, interface = named_by(statement)
        owner, _, rest = interface.partition(".")
        full_names[target] = f"{full_names.get(owner, owner)}.{rest}"
        try:
            exec(compile(ast.Module([statement], []), module, "exec"), namespace)
        except MissingInterfaceError:
            namespace[target] = namespace[owner]  # of which it is a part
        except (AttributeError, ImportError):
            namespace[target] = stand_in(feature, full_names[target])


def interfaces_of(source: str) -> Iterator[ast.ImportFrom | ast.Assign]:
    """The statements of a module's `try`, each of one name."""
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.Try)]
    for statement in block.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield ast.copy_location(ast.ImportFrom(statement.module, [alias], 0), statement)
        else:
            assert isinstance(statement, ast.Assign)
            yield statement


def named_by(statement: ast.ImportFrom | ast.Assign) -> tuple[str, str]:
    """The name that a statement gives an interface here, and where it is: in a module, or in an earlier interface."""
    if isinstance(statement, ast.ImportFrom):
        (alias,) = statement.names
        return alias.asname or alias.name, f"{statement.module}.{alias.name}"
    (target,) = statement.targets
    call = statement.value
    if isinstance(call, ast.Call):  # of a function above
        owner, name = call.args
        return ast.unparse(target), f"{_dotted(owner)}.{ast.literal_eval(name)}"
    return ast.unparse(target), _dotted(call)


def _dotted(node: ast.expr) -> str:
    """The name of a module, a class or an attribute; of an object that is made for its attributes, its class."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return _dotted(node.func) if isinstance(node, ast.Call) else ast.unparse(node)
