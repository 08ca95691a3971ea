"""What messages are made of: tables, sizes in bytes, times, names that were mistyped, and lines of a user's program."""

import difflib
import dis
import functools
import importlib.util
import inspect
import itertools
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch.compiler import is_compiling

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
UNITS = "kmgt"
Frames = Iterable[tuple[FrameType, int]]  # with the line of each, the innermost frame first

FOLDERS = os.path.dirname(torch.__file__), os.path.dirname(__file__)
PACKAGES = tuple(os.path.join(folder, "") for folder in FOLDERS)  # PyTorch and effops
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
PYTHON = os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen"
IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of cells, the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justified = (
        [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        + [cell.rjust(width) for cell, width in zip(row[left:], widths[left:])]
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in justified)


def format_bytes(count: float, digits: int = 1, *, rounds_up: bool = False) -> str:
    """A number of bytes for people: 33554432 -> '32.0 MiB'. Where it `rounds_up`, the text is no fewer bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        own_digits = 0 if unit == "B" else digits
        if rounds_up:
            count = math.ceil(count * 10**own_digits) / 10**own_digits
        text = f"{count:.{own_digits}f}"
        if abs(float(text)) < 1024:
            return f"{text} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def format_distinct_bytes(*counts: int) -> list[str]:
    """Numbers of bytes for people, with so many digits that different numbers look different."""
    for digits in itertools.count(1):
        texts = [format_bytes(count, digits) for count in counts]
        if len(set(texts)) == len(set(counts)):
            break
    return texts


def counted(count: int, things: str) -> str:
    """A number and the noun for it, which is given in the plural with an s: '1 thread', '2 threads'."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


# What others call a thing, and its names here, of which a function or module has one. Spelling does not lead there.
OTHER_NAMES = {
    "gpu": ["cuda"],
    "fp16": ["float16"],
    "bf16": ["bfloat16"],
    "fp32": ["float32"],
    "fp64": ["float64"],
    "width": ["d_model"],
    "hidden_size": ["d_model"],
    "embed_dim": ["d_model"],
    "dim": ["embed_dim"],
    "dimension": ["dim"],
    "mu": ["loc"],
    "mean": ["loc"],
    "kappa": ["concentration", "scale"],
    "concentration": ["scale"],
    "scale": ["concentration"],
    "sigma": ["scale"],
    "std": ["scale"],
    "value": ["x"],
    "values": ["x"],
    "depth": ["layers"],
    "length": ["seq_len"],
    "vmf": ["VonMisesFisher"],
}
# The same of words within names.
OTHER_WORDS = {"vmf": "von_mises_fisher", "gaussian": "normal"}
# Things that exist and are not here, though a name here is spelled alike, as "cpu". They are no typing errors.
OTHER_THINGS = {"gitlab", "hpu", "ipu", "mps", "npu", "tpu", "xpu"}


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """'; did you mean "attention"?' for 'attn', or nothing if no known name is near.

    A name is near too if it begins or ends with the given words: 'normal' is near 'normal_log_prob'.
    """
    text, known = str(given), list(known)
    if text.lower() in OTHER_THINGS:
        return ""
    others = {other: name for other, names in OTHER_NAMES.items() for name in names if name in known}
    meant = {**others, **{name: name for name in known}}
    text = text.lower() if text.lower() in meant else "_".join(OTHER_WORDS.get(word, word) for word in text.split("_"))
    near = [name for name in difflib.get_close_matches(text, meant) if _differ_little(text, name)]
    longer = [name for name in known if text and (name.startswith(f"{text}_") or name.endswith(f"_{text}"))]
    found = near or sorted(longer, key=len)
    return f'; did you mean "{meant[found[0]]}"?' if found else ""


def _differ_little(given: str, known: str) -> bool:
    """Whether names are near even without the words with which both begin or end.

    Of "norml_log_prob" and "normal_log_prob", "norml" and "normal" are compared.
    """
    parts = [given.split("_"), known.split("_")]
    for place in (0, -1):
        while all(parts) and parts[0][place] == parts[1][place]:
            for words in parts:
                words.pop(place)
    return not all(parts) or bool(difflib.get_close_matches("_".join(parts[0]), ["_".join(parts[1])]))


@functools.lru_cache(maxsize=1024)  # `hasattr` asks for the same names again and again
def _nearest(name: str, known: tuple[str, ...]) -> str:
    return did_you_mean(name, known)


def missing_name(
    module: str, name: str, known: Iterable[str], public_modules: tuple[str, ...] = ()
) -> AttributeError | ImportError:
    """What the `__getattr__` of a module raises for a name that it lacks: the error tells the nearest known name.

    Where one of its `public_modules` has the name, the error tells which. It is an ImportError where `from module
    import name` asks. That statement drops the text of an AttributeError.
    """
    near = "" if name.startswith("_") else _owned_by(module, name, public_modules) or _nearest(name, tuple(known))
    if not near:
        return AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))
    asker = sys._getframe(1).f_back
    imports = asker is not None and asker.f_code.co_code[asker.f_lasti] == IMPORT_FROM
    if imports and f"{module}.{name}" not in sys.modules:  # where a circle of imports is at work, it may be there
        return ImportError(f"cannot import name {name!r} from {module!r}{near}", name=module)
    # With the module as `obj`, Python would add its own suggestion.
    return AttributeError(f"module {module!r} has no attribute {name!r}{near}", name=name)


@functools.lru_cache(maxsize=1024)
def _owned_by(package: str, name: str, modules: tuple[str, ...]) -> str:
    """Which module has a public name; empty if none has it, or if it is itself a module that is to be imported."""
    if not modules or not name.isidentifier() or importlib.util.find_spec(f"{package}.{name}") is not None:
        return ""
    owners = (one for one in modules if name in importlib.import_module(f"{package}.{one}").__all__)
    return "".join(f"; it is {package}.{one}.{name}" for one in itertools.islice(owners, 1))


def tells_wrong_arguments(function: FunctionT, *, name: str = "", remedy: str = "") -> FunctionT:
    """The same function, whose TypeError for arguments that it does not take names what it takes, and the nearest name.

    `name` is that of the function in the error, and `remedy` is added to it. A method is told with the class of its
    object, and a class by its name alone.
    """

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            own = error.__traceback__
            if own is not None and own.tb_next is not None:  # the function has begun
                raise
            problem = why_not_bound(function, args, kwargs)
            if not problem:
                raise
        # Outside of `except`, so that Python's own error is not shown too.
        raise TypeError(f"{name or _name_of(function, args)}: {problem}{remedy}")

    result: Any = told
    # Dynamo limits the compilations of each code object, so each function gets one of its own.
    result.__code__ = told.__code__.replace()  # type: ignore[attr-defined]
    return result  # type: ignore[no-any-return]


class EnteredWhenCalled(type):
    """The class of context managers that say so where the class itself is entered, without its parentheses."""

    def __enter__(cls) -> NoReturn:
        arguments = ", ".join(inspect.signature(cls).parameters)
        raise TypeError(
            f"{cls.__name__}: `with` must enter a call of it; got the class; write `with effops.{cls.__name__}"
            f"({arguments}):`"
        )

    def __exit__(cls, *error: object) -> None:  # `with` asks for it first
        pass


def _name_of(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """The name of a function in an error."""
    if next(iter(inspect.signature(function).parameters), "") != "self":
        return function.__name__
    owner = type(args[0]).__name__
    return owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"


def why_not_bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which argument a function does not take or lacks, what it takes, and the nearest name; empty if it takes them.

    A function that takes any name is not asked.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # it is built in
        return ""
    if parameters.pop("self", None):
        args = args[1:]
    kinds = {one.kind for one in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return ""
    takes_any = any(map(_takes_any_number, parameters.values()))
    positional = [name for name, one in parameters.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = [*positional[: len(args)], *kwargs]
    names = ", ".join(parameters)
    if unknown := [name for name in kwargs if name not in parameters or _takes_any_number(parameters[name])]:
        return f"it takes {names}; got `{unknown[0]}`" + did_you_mean(unknown[0], parameters.keys() - set(given))
    if len(args) > len(positional) and not takes_any:
        by_name = [name for name in parameters if name not in positional]
        others = f"; give {' and '.join(by_name)} by name" if by_name else ""
        taken = f"{', '.join(positional)} by position" if parameters else "no arguments"
        return f"it takes {taken}; got {counted(len(args), 'arguments')}{others}"
    if twice := [name for name in positional[: len(args)] if name in kwargs]:
        return f"it takes `{twice[0]}` once; got it by position and by name; leave one out"
    required = [
        name
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty and not _takes_any_number(one)
    ]
    if lacking := [f"`{name}`" for name in required if name not in given]:
        return f"it takes {names}; got no {' and no '.join(lacking)}; give each of these"
    return ""


def _takes_any_number(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.VAR_POSITIONAL


def check_flags(function: str, **flags: Any) -> None:
    """Raise unless each of these is True or False: a text such as "no" would count as True."""
    for argument, flag in flags.items():
        if not isinstance(flag, bool):
            remedy = "False" if str(flag).lower() in ("no", "off", "false", "0", "none") else "True"
            got = f"{type(flag).__name__} {flag!r}"
            raise TypeError(f"{function}: `{argument}` must be True or False; got {got}; give {remedy}")


def integer_remedy(given: Any) -> str:
    """What to give in place of what is no integer. `int()` is no remedy where it would change a number."""
    try:
        number = int(given)
        is_whole = isinstance(given, str) or bool(number == given)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return "give one, as 1"
    return "convert it with int()" if is_whole else f"give a whole number, as {max(1, number)}"


def format_us(microseconds: float) -> str:
    """Microseconds for people: 1234.5 -> '1.234 ms'."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3f} {unit}"
    return f"{microseconds:.1f} us"


def how_to_install(extra: str) -> str:
    """What brings the packages of an extra: effops is on no package index yet, and is installed from its checkout."""
    return f'in the checkout, pip install -c constraints.txt -e ".[{extra}]"'


def parse_bytes(amount: str | float, name: str = "parse_bytes") -> int:
    """Bytes of a number, as 6e9, or of a text with a unit, as "6G", "6 GiB" or "512 MB".

    K, M, G and T are binary, alone and in KiB to TiB; KB to TB are powers of 1000. `name` begins the error: the
    function and the argument that was given.

    Raises:
        ValueError: that is no amount of bytes: another text, one without a unit but "0", below 0, or between 0 and 1

    Example:
        >>> parse_bytes("1.5 GiB"), parse_bytes("6G"), parse_bytes(6e9)
        (1610612736, 6442450944, 6000000000)
    """
    nbytes = _bytes_or_nan(amount)
    if nbytes < 0:
        raise ValueError(f"{name}: expected at least 0 bytes; got {amount!r}; write it without the sign")
    if not nbytes < math.inf:
        raise ValueError(
            f"{name}: expected a number and B, KB, MB, GB or TB (powers of 1000), or K, M, G or T (binary, as KiB to "
            f'TiB), as "6G"; got {amount!r}'
        )
    if isinstance(amount, str) and nbytes and not amount.strip()[-1].isalpha():
        number = amount.strip()
        larger = f'"{number}MiB", or ' if nbytes < 2**20 else ""
        raise ValueError(
            f"{name}: expected a unit behind the number; got {amount!r}; write {larger}"
            f'"{number}B" for bytes (in Python also {number} as a number)'
        )
    if 0 < nbytes < 1:
        raise ValueError(f'{name}: expected at least 1 byte; got {amount!r}; give a unit, as "0.5 GiB"')
    return int(nbytes)


def _bytes_or_nan(amount: str | float) -> float:
    """The bytes of a number, or of a text whose unit may be lacking; NaN if it is no amount."""
    if isinstance(amount, bool):
        return math.nan
    if isinstance(amount, Real):
        return float(amount)
    found = re.fullmatch(
        r"(?P<number>-?(\d+\.?\d*|\.\d+)(e\d+)?)\s*(?P<unit>[kmgt]?)(?P<ending>i?b)?", str(amount).strip().lower()
    )
    if found is None or (found["ending"] == "ib" and not found["unit"]):
        return math.nan
    base = 1000.0 if found["ending"] == "b" else 1024.0
    return float(found["number"]) * base ** (UNITS.index(found["unit"]) + 1 if found["unit"] else 0)


def text_of(error: Exception) -> str:
    """The text of an error: that of a KeyError without the quotes that Python sets around it."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


def told_syntax_error(error: SyntaxError) -> str:
    """What is wrong with Python code, and where: "SyntaxError in a.py, line 2: '(' was never closed: x = (1,"."""
    text = f": {error.text.strip()}" if error.text and error.text.strip() else ""
    return f"{type(error).__name__} in {error.filename}, line {error.lineno}: {error.msg}{text}"


def line_of_program(frames: Frames) -> str:
    """The place of the innermost frame that is neither PyTorch's, effops' nor Python's; empty if there is none.

    If it lies in an installed package, the place where the user's own program called that is named too.
    """
    places = [(_file_of(frame), line) for frame, line in frames]
    places = [place for place in places if not place[0].startswith(PACKAGES) and not _is_of_python(place[0])]
    own = [place for place in places if not _is_installed(place[0])]
    if not places:
        return ""
    text = "in {}, line {}".format(*places[0])
    return text + ", called in {}, line {}".format(*own[0]) if own and own[0] != places[0] else text


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an error went through, the innermost first: those of its cause come before its own."""
    if error.__cause__ is not None:
        yield from frames_of(error.__cause__)
    yield from reversed(list(traceback.walk_tb(error.__traceback__)))


def _file_of(frame: FrameType) -> str:
    """The file of a frame. Code that a dataclass has generated has none, and belongs to that of its module."""
    file = frame.f_code.co_filename
    return str(frame.f_globals.get("__file__", file)) if file == "<string>" else file


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in INSTALLED)


def _is_of_python(file: str) -> bool:
    return file.startswith(PYTHON) and not _is_installed(file)
