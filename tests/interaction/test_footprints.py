"""One call enters no more files of ours than before: real sandboxes, walked in a process of their own."""

import json
import subprocess  # noqa: TID251 - runs the counting program; nothing here comes from a sandbox
import sys

import pytest
from tests.fixtures.internet import Cable, wires
from tests.perf.measures import MEASURES
from tests.repo.files import ROOT
from tests.repo.test_measures import AT_MOST

__all__ = ["wires"]


def grown(part: str) -> dict[str, int]:
    """Return the numbers over their bounds, counted in a fresh process: caches of other tests would change them."""
    command = [sys.executable, "-m", "tests.perf.measures", "--json", "--part", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)["counts"]
    assert counts.keys() == {measure.key for measure in MEASURES if measure.part == part}
    return {key: number for key, number in counts.items() if number > AT_MOST[key]}


@pytest.mark.driver("bubblewrap")
def test_a_warm_call_enters_no_more_files() -> None:
    """Files, moves between them, and files of features that have nothing to do, of `print(1)` over stdio."""
    assert grown("warm") == {}


@pytest.mark.driver("bubblewrap")
def test_a_connection_enters_no_more_files(wires: Cable) -> None:
    """Files of the egress part of one `fetch_url` that gets a credential."""
    assert grown("fetch") == {}
