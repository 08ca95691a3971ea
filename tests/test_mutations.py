"""The mutations that `tests/mutations.py` tries by hand."""

import pytest

from . import mutations


@pytest.mark.parametrize("mutation", mutations.BY_HAND, ids=lambda mutation: mutation.what)
def test_they_fit_the_code(mutation):
    """A mutation whose text the code no longer has tells nothing."""
    assert (mutations.ROOT / mutation.file).read_text().count(mutation.old) == 1
