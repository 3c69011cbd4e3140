"""Recorded calls decided again: what would change, and what nobody can know."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tests.fixtures.audit_logs import decided

from glovebox_audit.chain import draft
from glovebox_audit.file import LogFile
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import digest
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, USAGE

PROFILE = load([SHIPPED], check_example=None)["run_python"]
CODE: dict[str, Any] = {"code": "1", "inputs": [], "timeout_seconds": None}


def simulated(place: Path, text: str, *calls: Any, since: str = "30d") -> tuple[int, Any]:
    """Record these decisions, and decide them again under a profile."""
    (place / "state").mkdir(mode=0o700)
    log = LogFile(place / "state" / "audit", "s_1")
    for call in calls:
        log.commit([draft(call)])
    log.close()
    candidate = place / "run_python.toml"
    candidate.write_text(text)
    candidate.chmod(0o600)
    words = ["profiles", "simulate", str(candidate), "--since", since, "--state-dir", str(place / "state"), "--json"]
    found = CliRunner().invoke(main, words)
    return found.exit_code, json.loads(found.stdout)


def test_calls_that_would_be_decided_otherwise_are_named(tmp_path: Path) -> None:
    """One that may take longer than the candidate lets it; one that was asked about; the other is the same."""
    text = (SHIPPED / "run_python.toml").read_text()
    assert "wall_seconds = 30" in text
    allowed = decided("c_short")
    code, found = simulated(
        tmp_path,
        text.replace("wall_seconds = 30", "wall_seconds = 20"),
        replace(allowed, arguments=CODE),
        replace(allowed, call_id="c_long", arguments={**CODE, "timeout_seconds": 25.0}),
        replace(allowed, call_id="c_asked", effect="ask", rule="approval.ask", arguments=CODE),
        replace(allowed, call_id="c_other", tool="fetch_url", arguments={"url": "https://a.org"}),
    )
    named = {each["call_id"]: (each["was"], each["now"], each["rule"]) for each in found["otherwise"]}
    assert named == {"c_long": ("allow", "deny", "limits.wall_seconds"), "c_asked": ("ask", "allow", "approval.ask")}
    assert (code, found["same"], found["unknown"], found["elsewhere"]) == (FAILED, 1, {}, 0)


def test_what_cannot_be_known_is_counted_and_not_guessed(tmp_path: Path) -> None:
    """Without arguments as they were, unless that profile decided; what a role refused or somebody lifted stays."""
    text = (SHIPPED / "run_python.toml").read_text()
    call = decided("c_1")
    code, found = simulated(
        tmp_path,
        text,
        call,
        replace(call, call_id="c_2", profile_digest=digest(PROFILE)),
        replace(call, call_id="c_3", effect="deny", rule="role.tools", arguments=CODE),
        replace(call, call_id="c_4", grants=("host:a.org:443 (a_1)",), arguments=CODE),
        replace(call, call_id="c_5", arguments=CODE, redacted={"GitHub token": 1}),
    )
    assert (code, found["same"], found["unknown"], found["elsewhere"]) == (OK, 1, {"run_python": 2}, 2)


def test_calls_before_the_time_are_left_out_and_a_missing_candidate_is_named(tmp_path: Path) -> None:
    """The control is the same call, later than the time."""
    text = (SHIPPED / "run_python.toml").read_text()
    _, found = simulated(tmp_path, text, decided("c_1"), since="2100-01-01")
    assert found["unknown"] == {}
    told = CliRunner().invoke(main, ["profiles", "simulate", str(tmp_path / "none"), "--state-dir", str(tmp_path)])
    assert (told.exit_code, "does not exist" in told.stderr) == (USAGE, True)
