"""``glovebox usage``: what was spent, told apart by what was asked for, for people, programs and spreadsheets."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from glovebox_profiles.policy.model import SPENDING
from glovebox_server.cli.main import main
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.spending import Clocks, Spender, read_clocks
from glovebox_server.guards.budgets.store import ReservationRequest
from glovebox_server.stores import database

HOUR = 3_600_000


def _spent(state_dir: Path) -> None:
    """Two callers, two tools, today and ten days ago; one of them has a name that a spreadsheet would run."""
    now, spent = read_clocks(), {"calls": 1, "wall_seconds": 1500, "disclosed_bytes": 7}
    calls = [("token:a", "run_python", 0), ("token:a", "run_python", 0), ("token:a", "fetch_url", 0),
             ("=1+1", "run_python", 0), ("token:a", "run_python", 10 * 24)]  # fmt: skip
    with database.opened(state_dir / "governance" / store.NAME, store.SCHEMA) as kept:
        for number, (principal, tool, hours) in enumerate(calls):
            clocks = Clocks(wall=now.wall - hours * HOUR, boot=now.boot, since_boot=now.since_boot)
            who = Spender(principal=principal, run="r", workflow="", tool=tool)
            asked = ReservationRequest(call_id=f"c_{number}", spender=who, lines=(), worst={})
            kept.transact_now(lambda one, c=clocks, a=asked: store.Ledger(one, c).reserve("s", a))  # type: ignore[misc]
            kept.transact_now(lambda one, c=clocks, a=asked: store.Ledger(one, c).settle(a.call_id, spent))  # type: ignore[misc]


def _usage(state_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["usage", "--state-dir", str(state_dir), *arguments])


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """With some usage in it."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    _spent(directory)
    return directory


def test_usage_is_told_by_principal_and_tool_of_the_last_week(state_dir: Path) -> None:
    """Those that made most calls first; what is older is left out, and in where it is asked for."""
    rows = json.loads(_usage(state_dir, "--json").stdout)["usage"]
    first = rows[0]
    assert (first["principal"], first["tool"], first["calls"]) == ("token:a", "run_python", 2)
    assert (rows[0]["wall_seconds"], rows[0]["disclosed_bytes"], rows[0]["lost"]) == (3.0, 14, 0)
    assert len(rows) == 3
    (everything,) = json.loads(_usage(state_dir, "--by", "", "--since", "30d", "--json").stdout)["usage"]
    assert everything["calls"] == 5
    by_day = json.loads(_usage(state_dir, "--by", "day,hour", "--since", "30d", "--json").stdout)["usage"]
    assert [each["calls"] for each in by_day] == [4, 1]
    assert by_day[0]["hour"].startswith(by_day[0]["day"])


def test_usage_as_csv_has_no_formulas(state_dir: Path) -> None:
    """A caller's name is data in a spreadsheet too; the control is the same name as JSON."""
    rows = list(csv.reader(io.StringIO(_usage(state_dir, "--csv", "--by", "principal").stdout)))
    assert rows[0] == ["principal", *SPENDING, "lost"]
    assert {row[0] for row in rows[1:]} == {"token:a", "'=1+1"}
    assert "=1+1" in {each["principal"] for each in json.loads(_usage(state_dir, "--json").stdout)["usage"]}


def test_usage_as_a_table(state_dir: Path) -> None:
    """One line for each, seconds as seconds."""
    lines = _usage(state_dir).stdout.splitlines()
    assert lines[0].split()[:3] == ["principal", "tool", "calls"]
    assert lines[1].split()[:6] == ["token:a", "run_python", "2", "0", "3", "0"]


def test_mistakes_are_told(state_dir: Path, tmp_path: Path) -> None:
    """And where nothing is counted nothing is made."""
    assert "is not some of principal,workflow,tool,day,hour" in _usage(state_dir, "--by", "colour").output
    assert "Choose one of" in _usage(state_dir, "--csv", "--json").output
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    found = _usage(empty)
    assert (found.exit_code, found.stdout) == (0, "")
    assert "Nothing is counted" in found.stderr
    assert list(empty.iterdir()) == []
    path = state_dir / "governance" / store.NAME
    path.write_bytes(b"no database")
    assert _usage(state_dir).exit_code != 0
