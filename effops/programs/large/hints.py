"""What to do about a finding without a fix: why there is none, and what takes less in this program."""

from __future__ import annotations

from effops.programs.large.humps import Found
from effops.programs.large.in_tiles import accepted_by_tiled
from effops.programs.large.source.trials import SMALL
from effops.pytorch.missing import IN_TILES, obstacle

OF_LIBRARY = "a library makes it, and lint rewrites statements of yours alone"
NOT_TOGETHER = (
    "what makes it and what reduces it do not stand side by side in one function, in statements that make tensors alone"
)
NOT_TRIED = (
    "its statements could not be run alone on small tensors, as where they call modules or methods of yours, or write "
    "files"
)
NONE_IS_LESS = "nothing that was tried gives the same results and gradients in half the bytes"


def hint(found: Found, slices: int, trials: int) -> str:
    """A line for a finding of which so many slices were found, and so many of these could be tried."""
    why = NONE_IS_LESS if trials else NOT_TRIED if slices else NOT_TOGETHER
    if not trials and found.main.site.library is not None:
        why = OF_LIBRARY
    if obstacle(IN_TILES):
        why += f"; none in tiles was tried: {obstacle(IN_TILES)}"
    remedies = _remedies(found)
    return f"no fix: {why}" + (f"; try {', or '.join(remedies)}" if remedies else "")


def _remedies(found: Found) -> list[str]:
    """What takes less in this program, of what a user can do by hand."""
    remedies = []
    if found.top.in_parts:
        remedies.append("making in each turn of the loop the part that it reads, in place of all parts before it")
    function = accepted_by_tiled(found)
    if function is not None:
        remedies.append(f"`effops.tiled` of `{function}`, which accepts it and checks its results when it first runs")
    if found.is_loop:
        remedies.append("`torch.utils.checkpoint` around each turn, which then keeps what it reads alone")
    elif found.kept_bytes:
        remedies.append(
            "`torch.utils.checkpoint` around these lines, so that it is made again and not kept for backward"
        )
    size = found.main.shapes[0][0] if found.main.shapes[0] else 0
    if not found.is_loop and size > SMALL and size in _sizes_of_data(found):
        remedies.append(f"a smaller batch: its bytes are in proportion to the {size} of {found.main.shapes[0]}")
    return remedies


def _sizes_of_data(found: Found) -> set[int]:
    """The sizes of what goes in, as that of a batch, without those of parameters, which stay as they are."""
    roots = {id(root): root for hump in found.humps for root in hump.roots}
    reads = [read for member in found.members if member.maker is not None for read in member.maker.reads]
    data = [read.shape for read in reads if id(read.storage) in roots and not read.storage.is_parameter]
    fixed = {size for read in reads if read.storage.is_parameter for size in read.shape}
    return {size for shape in data for size in shape} - fixed
