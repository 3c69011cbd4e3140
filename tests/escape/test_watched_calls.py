"""Watch rules with real sandboxes: a canary that leaves is stopped, and ordinary programs are not minded."""

import re
from pathlib import Path

import anyio
import pytest
from tests.fixtures import ordinary_programs
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import DRIVERS, Heard, profile, submitted
from tests.fixtures.whole_commands import GLOVEBOX

from glovebox_server import app as apps
from glovebox_server.guards.watch.canaries import plant
from glovebox_server.guards.watch.watch import DENIALS_IN_A_ROW
from glovebox_server.settings import Settings

READ = "text = open('/workspace/deploy.env').read()\n"
LEAVING = (
    "print(text)",
    "import sys; print(text.encode().hex(':'), file=sys.stderr)",
    "import base64; open('/output/a.bin', 'wb').write(b'x' * 70_000 + base64.b64encode(text.encode()))",
    "for letter in text: print(letter, flush=True)",
    "import os; open('/output/' + text.split('=')[-1].strip() + '.txt', 'w')",
    "raise ValueError(text[::-1])",
)


def _settings(tmp_path: Path, driver: str) -> Settings:
    for name in ("profiles", "workspace"):
        (tmp_path / name).mkdir()
    ordinary_programs.lay_out(tmp_path / "workspace")
    text = profile("run_python", driver).replace("[network]", "[files]\nworkspace = 'read'\noutput = true\n[network]")
    (tmp_path / "profiles" / "run_python.toml").write_text(text)
    workspace = tmp_path / "workspace"
    return Settings(workspace=workspace, profiles_dir=tmp_path / "profiles", state_dir=tmp_path / "state")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_canary_that_leaves_its_sandbox_is_stopped(driver: str, tmp_path: Path) -> None:
    """By output, error, file, its name, or a traceback; the control is a program that reads it and keeps it."""
    settings = _settings(tmp_path, driver)
    async with apps.opened(settings, "cli") as app:
        marker = plant(settings.state_dir, tmp_path / "workspace", "deploy.env").marker
        assert not (await submitted(app, "run_python", {"code": READ + "print(len(text))"})).failed
        for number, code in enumerate(LEAVING):
            heard = Heard()
            result = await submitted(app, "run_python", {"code": READ + code}, heard, run=f"r_{number:026}")
            assert result.structured["refused"]["rule"] == "stop", code
            assert marker not in str(result) + heard.text
        read = await submitted(app, "read_workspace_file", {"path": "deploy.env", "limit": 1}, run="r_" + "9" * 26)
        assert read.structured["refused"]["rule"] == "stop"
    assert marker.encode() not in b"".join(log_lines(settings.state_dir / "audit"))


@pytest.mark.driver("bubblewrap")
async def test_forty_ordinary_programs_raise_no_alarm(tmp_path: Path) -> None:
    """With canaries beside the files that they read. The control is the last: it prints one."""
    settings = _settings(tmp_path, "bubblewrap")
    assert len(ordinary_programs.PROGRAMS) == 40
    async with apps.opened(settings, "cli") as app:
        for number in range(3):
            plant(settings.state_dir, tmp_path / "workspace", f"deploy-{number}.env")
        for code in (*ordinary_programs.PROGRAMS, "print(open('/workspace/deploy-1.env').read())"):
            alarms = [line for line in log_lines(settings.state_dir / "audit") if b'"kind":"watch.alarm"' in line]
            assert alarms == [], code
            await submitted(app, "run_python", {"code": code}, run="r_" + "0" * 26)
        assert b'"kind":"watch.alarm"' in b"".join(log_lines(settings.state_dir / "audit"))


ASKING = """
version = 1
default = "anybody"
[roles.anybody]
tools = ["run_python"]
[watch]
denials = "ask"
[[example]]
principal = "local:0"
call = { tool = "run_python", arguments = { code = "1" } }
expect = "allow"
"""


@pytest.mark.driver("bubblewrap")
async def test_a_run_that_is_asked_about_runs_once_an_operator_says_yes(tmp_path: Path) -> None:
    """By the policy's word; refused until then. The control is another run, which nobody is asked about."""
    settings = _settings(tmp_path, "bubblewrap")
    (tmp_path / "policy.toml").write_text(ASKING)
    (tmp_path / "policy.toml").chmod(0o600)
    settings = settings.model_copy(update={"policy": tmp_path / "policy.toml"})
    run, code = "r_" + "0" * 26, {"code": "print(1)"}
    async with apps.opened(settings, "cli") as app:
        assert not (await submitted(app, "run_python", code, run=run)).failed
        for _ in range(DENIALS_IN_A_ROW):
            denied = await submitted(app, "run_python", {**code, "timeout_seconds": 600}, run=run)
            assert denied.structured["refused"]["rule"] == "limits.wall_seconds"
        asked = await submitted(app, "run_python", code, run=run)
        assert asked.structured["refused"]["rule"] == "approval.pending"
        assert not (await submitted(app, "run_python", code, run="r_" + "1" * 26)).failed
        refusal = asked.structured["refused"]
        question = re.findall(r"a_[0-9a-z]{26}", refusal["reason"] + refusal["hint"])[0]
        places = ["--state-dir", str(settings.state_dir), "--policy", str(settings.policy)]
        await anyio.run_process([*GLOVEBOX, "approvals", "allow", question, *places])
        assert not (await submitted(app, "run_python", code, run=run)).failed
