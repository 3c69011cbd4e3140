"""Calls that are stopped, with real sandboxes in two server processes: they end, and no other does (M6)."""

from pathlib import Path

import pytest
from tests.fixtures.brokered import DRIVERS
from tests.soak.stops import storm

STOPS = 6
"""Two at each stage. ``python -m tests.soak.stops`` makes a thousand, and says whether each call ended in time."""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_stopped_run_ends_and_no_other_does(driver: str, tmp_path: Path) -> None:
    """Wherever it is: waiting, starting, running. Control: the runs beside it, and a bystander's."""
    tmp_path.chmod(0o755)
    found = await storm(tmp_path, stops=STOPS, driver=driver)
    assert found.others == []
    assert found.stops == STOPS
    assert found.bystanders > 0
    assert found.log_whole
