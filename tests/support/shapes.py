"""Random shapes that broadcast."""

from hypothesis import strategies as st


@st.composite
def broadcastable(draw):
    """Three shapes. Sizes may be 0."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    return tuple(
        tuple(draw(st.sampled_from([1, size])) for size in sizes[draw(st.integers(0, len(sizes))) :]) for _ in range(3)
    )
