"""What many of these tests begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fixtures.approving import Desk, a_desk


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """One server's approvals, in the directory ``s``."""
    async with a_desk(tmp_path / "s") as found:
        yield found
