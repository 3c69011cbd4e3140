"""Where the tests here run Glovebox: one place of a normal user, with a runtime of its own, and one of root's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.inside.place import Place, made


@pytest.fixture(scope="session")
def place(runtime_dir: Path) -> Iterator[Place]:
    """Directories of a normal user, and the way to become that user."""
    with made(runtime_dir, user=True) as found:
        yield found


@pytest.fixture(scope="session")
def roots_place(runtime_dir: Path) -> Iterator[Place]:
    """Directories of root's, for what only root can be in."""
    if os.geteuid() != 0:
        pytest.skip("only root can be in this situation")
    with made(runtime_dir, user=False) as found:
        yield found
