"""The explorer widget that the tests of this room look at."""

from collections.abc import Iterator

import pytest

from dshistory.explorer import Explorer
from dshistory.widgets.exploration import Exploration


@pytest.fixture
def e(h: Explorer) -> Iterator[Exploration]:
    """Explore the history `h` of the test's module; everything is shown when the test begins."""
    exploration = h.explore()
    assert exploration.wait(60)
    yield exploration
    exploration.close()
