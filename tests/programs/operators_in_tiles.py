"""PyTorch's own samples of its operators, in tiles of two: results and gradients are those of the whole, or refused.

python -m tests.programs.operators_in_tiles               # all: the share that is refused, and by which operators
python -m tests.programs.operators_in_tiles cumsum sort   # those with such a part in their name
"""

import collections
import functools
import logging
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from effops.programs.tiles.refusals import CannotTile

from .forced_tiles import forced, is_float

NAMES = sorted({op.full_name for op in op_db})
SAMPLES = 6  # of an operator
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
CUT, NOTHING = "cut", ""  # else why not


def samples_of(name):
    """(operator, sample) of PyTorch, the first ones."""
    for op in (one for one in op_db if one.full_name == name and one.name not in UNDEFINED):
        if torch.float32 in op.dtypes:
            samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
            yield from ((op, one) for one in samples[:SAMPLES])


def hold(op, sample):
    """Compare tiles with the whole, along each axis. Returns CUT, why it is refused, or NOTHING if nothing can be."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[place].detach().requires_grad_(leaves[place].requires_grad) for place in places]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return tree_leaves(op(first, *args, **kwargs))

    if not given or any(one.layout != torch.strided for one in given):
        return NOTHING
    try:
        expected = function(*given)
    except Exception:
        return NOTHING  # a sample that does not run here
    if not all(isinstance(one, torch.Tensor) for one in expected):
        return NOTHING
    try:
        programs, blocked = forced(function, given, 2)
    except CannotTile as error:
        return error.operator or error.reason
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        return f"not traced: {type(error).__name__}"
    for axis, program in programs:
        about = f"{op.full_name}, axis {axis}, {[tuple(one.shape) for one in given]}, {sample.args}, {sample.kwargs}"
        torch.manual_seed(0)
        found = program(*given)
        torch.manual_seed(0)
        close(found, function(*given), about)
        outputs = [number for number, one in enumerate(expected) if is_float(one) and one.requires_grad]
        wanted = [one for one in given if one.requires_grad]
        if outputs and wanted:
            upstream = [torch.randn_like(expected[number]) for number in outputs]

            def pulled(results, outputs=outputs, wanted=wanted, upstream=upstream):
                chosen = [results[number] for number in outputs]
                return torch.autograd.grad(chosen, wanted, upstream, allow_unused=True)

            try:
                right = pulled(function(*given))
            except RuntimeError:
                continue  # eigenvectors have none that depends on their phase
            exact = functools.partial(gradients_in_float64, function, given, outputs, upstream)
            close(pulled(found), right, f"gradients of {about}", exact)
    return CUT if programs else blocked[0] if blocked else NOTHING


def gradients_in_float64(function, given, outputs, upstream):
    wide = [(one.detach().double() if is_float(one) else one).requires_grad_(one.requires_grad) for one in given]
    results = function(*wide)
    wanted = [one for one in wide if one.requires_grad]
    upstream = [one.double() for one in upstream]
    return torch.autograd.grad([results[number] for number in outputs], wanted, upstream, allow_unused=True)


def close(found, expected, about, exact=None):
    """Whether all are equal but for roundings, of which tiles may have more by a factor; `exact` tells the errors."""
    assert len(found) == len(expected), about
    for number, (one, other) in enumerate(zip(found, expected)):
        assert (one is None) == (other is None), about
        if other is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), about
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True):
                assert exact is not None, (about, one, other)
                error, own = ((each - exact()[number]).abs().max() for each in (one, other))
                assert error <= 8 * own, (about, one, other)


def main():
    logging.disable(logging.ERROR)  # of shapes that do not fit, while operators are traced
    warnings.simplefilter("ignore")
    names = [one for one in NAMES if len(sys.argv) == 1 or any(part in one for part in sys.argv[1:])]
    counts, reasons, operators, wrong = collections.Counter(), collections.Counter(), collections.defaultdict(set), []
    for number, name in enumerate(names, 1):
        own = collections.Counter()
        try:
            samples = list(samples_of(name))
        except Exception as error:
            print(f"{number}/{len(names)} {name}: no samples, {type(error).__name__}", flush=True)
            continue
        for op, sample in samples:
            try:
                outcome = hold(op, sample)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__} {error}")
                outcome = "WRONG"
            own[outcome] += 1
            counts["cut" if outcome == CUT else "nothing" if outcome == NOTHING else "refused"] += 1
            if outcome not in (CUT, NOTHING):
                reasons[outcome] += 1
                operators[outcome].add(name)
        print(f"{number}/{len(names)} {name}: {dict(own)}", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}: {', '.join(sorted(operators[reason])[:6])}")
    print(*wrong, sep="\n")
    total = counts["cut"] + counts["refused"]
    print(
        f"{total} samples with something to cut: {counts['cut']} cut, {counts['refused']} refused "
        f"({counts['refused'] / max(1, total):.1%}), of these {len(wrong)} wrong"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
