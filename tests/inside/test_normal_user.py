"""As a normal user, where user namespaces work: bubblewrap does all it claims, without root or control groups."""

import json
import os
import signal

import psutil
import pytest
from tests.fixtures.workers import workers
from tests.inside.place import GLOVEBOX, PYTHON, Place, assert_reached, look

pytestmark = pytest.mark.driver("bubblewrap")
HALF = """
import sys
from glovebox_sandboxes.conformance import prove
from glovebox_server.cli.host import doctor
from glovebox_server.cli.main import main

start, half, whole, calls = sys.argv.pop(1), int(sys.argv.pop(1)), doctor.prove, prove.system_calls

async def none(*_):
    return []

async def proved(driver, suite, host, heard, now="cold"):
    prove.system_calls = calls if now == start and half else none
    return await whole(driver, suite[half::2] if now == start else (), host, heard, now)

doctor.prove = proved
main()
"""
"""`glovebox`, whose proofs are of sandboxes with this start, and of every other case."""


async def test_a_normal_user_gets_a_whole_call(place: Place) -> None:
    """Doctor, manifest and call agree; what is missing is named, and who asks too."""
    seen = await look(place)
    assert seen.doctor["host"]["root"] is False
    limits = seen.driver["limits"]["memory_bytes"]
    assert_reached(seen, limits)
    if limits == "rlimit":  # in a session that has no control group of its own, as nearly all
        (missing,) = seen.driver["missing"]
        assert missing["what"] == "no control groups: limits hold per process"
        assert "in a systemd unit with Delegate=yes" in missing["fix"]


@pytest.mark.parametrize("half", ["0", "1"])
@pytest.mark.parametrize("start", ["cold", "forked"])
def test_every_claim_holds_for_a_normal_user_and_nothing_is_left(place: Place, start: str, half: str) -> None:
    """The whole suite, in four parts, on the user's own runtime; then no process of the user's runs."""
    owner = (place.root / "state").stat().st_uid
    for worker in workers(place.root / "state"):  # of another test's server; it makes sandboxes ready
        os.kill(worker, signal.SIGKILL)
    before = {process.pid for process in psutil.process_iter(["uids"]) if process.info["uids"].real == owner}
    done = place.run(PYTHON, "-c", HALF, start, half, "doctor", "--prove", "--driver", "bubblewrap", "--json")
    assert done.stdout, done.stderr
    proof = json.loads(done.stdout)
    assert [driver["start"] for driver in proof["drivers"]] == ["cold", "forked"]
    findings = [each for driver in proof["drivers"] for each in driver["findings"]]
    assert [each for each in findings if each["status"] not in ("held", "gap")] == []
    held = {each["area"] for each in findings if each["status"] == "held"}
    assert held >= {"overlay", "limits", "network"}
    assert (proof["holds"], done.returncode) == (True, 0)
    # What removes the control groups of a server that was killed ends a moment after it.
    more = [
        each for each in psutil.process_iter(["uids"]) if each.info["uids"].real == owner and each.pid not in before
    ]
    assert psutil.wait_procs(more, timeout=10)[1] == []


async def test_a_guest_that_a_user_cannot_add_is_said_with_what_to_do(place: Place) -> None:
    """A runtime of somebody else's is used as it is; its owner has to add what an upgrade changed. Control: above."""
    guests = [path for path in place.data.iterdir() if path.name.startswith("guest-")]
    moved = [(path, place.root / path.name) for path in guests]
    for path, elsewhere in moved:
        path.rename(elsewhere)
    place.data.chmod(0o555)
    try:
        done = place.run(*GLOVEBOX, "doctor", "--json")
    finally:
        place.data.chmod(0o755)
        for path, elsewhere in moved:
            elsewhere.rename(path)
    (driver,) = (each for each in json.loads(done.stdout)["drivers"] if each["driver"] == "bubblewrap")
    (missing,) = (each for each in driver["missing"] if each["fatal"])
    assert "where this user may not write" in missing["what"]
    assert f"`glovebox setup --data-dir {place.data}` as the user it belongs to" in missing["fix"]
