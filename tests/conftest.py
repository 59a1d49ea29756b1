"""Set-up that every test shares."""

import os
from pathlib import Path

import pytest

# As in a scheduler process, and before anything imports torch: threads that wait for each other don't turn for long,
# so that tests finish in time on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

PACKAGING = Path(__file__).parent / "packaging"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side, a file stays together for its fixtures, and one process builds the wheel.

    First, for xdist puts the groups into the names of the tests in a hook of its own.
    """
    for item in items:
        group = PACKAGING if PACKAGING in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(group)))
