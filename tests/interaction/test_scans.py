"""``glovebox artifact scan``: bytes are parsed in a sandbox, by a call on record; only findings come out."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fixtures.artifact_stores import Clock, a_store, keep
from tests.fixtures.audit_logs import log_lines

from glovebox_server.calls import Principal
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, UNAVAILABLE

pytestmark = pytest.mark.driver("bubblewrap")
FILES = {"a.html": b"<html><script>1</script>", "b.csv": b"a,1\n"}


def test_findings_come_from_a_sandbox_and_nothing_else_does(tmp_path: Path, runtime_dir: Path) -> None:
    """One call of run_python with the files as inputs; of somebody else's files nothing is told."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "config/profiles").mkdir(parents=True)

    async def fill() -> list[str]:
        async with a_store(tmp_path / "state/artifacts", Clock(datetime.now(UTC))) as store:
            me = Principal(id=f"local:{os.getuid()}", transport="cli")
            mine = [(await keep(store, name, content, principal=me)).uri for name, content in FILES.items()]
            return [*mine, (await keep(store, "c.csv", b"1\n")).uri]

    html, csv, others = asyncio.run(fill())
    options = ["--state-dir", str(tmp_path / "state"), "--profiles-dir", str(tmp_path / "config/profiles")]

    def scan(*uris: str) -> tuple[int, str]:
        words = ["artifact", "scan", *uris, "--json", "--data-dir", str(runtime_dir), *options]
        found = CliRunner().invoke(main, words)
        return found.exit_code, found.stdout

    status, text = scan(html, csv)
    assert status == FAILED
    assert json.loads(text) == {"findings": {"a.html": ["markup: a script"], "b.csv": []}}
    assert scan(csv)[0] == OK
    kinds = [json.loads(line)["kind"] for line in log_lines(tmp_path / "state/audit")]
    assert kinds.count("sandbox.started") == kinds.count("call.finished") == 2
    status, text = scan(others)
    assert (status, "c.csv" in text) == (UNAVAILABLE, False)
