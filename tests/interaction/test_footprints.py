"""One call enters no more files of ours than before, nor does a start import more: in processes of their own."""

import json
import os
import subprocess  # noqa: TID251 - runs the counting program; nothing here comes from a sandbox
import sys
from pathlib import Path

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


NOTIFY = "glovebox_server.notify.sender"
#: What takes longest to import, by who needs it: every call, every server, and one over HTTP or with Docker alone.
CALLS = {"anyio", "cryptography", "pydantic", "rich", "sqlite3"}
SERVES = {"httpx2", "mcp", "mcp_types", "starlette", "structlog", "uvicorn"}
REST = {"cryptography.x509", "docker", "glovebox_server.transport.auth", "jwt", "requests", NOTIFY}
#: What telemetry needs, and what sends it.
TELEMETRY = {"glovebox_server.mcp.messages", "glovebox_server.telemetry", "opentelemetry.sdk", "requests"}
NOTIFYING, SENDING = {"GLOVEBOX_NOTIFY": "exec:true"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("words", "needed", "variables"),
    [
        (["--help"], set[str](), {}),
        (["call", "none"], CALLS, NOTIFYING | SENDING),
        (["serve"], CALLS | SERVES, {"OTEL_SDK_DISABLED": "true", **SENDING}),
        (["serve"], CALLS | SERVES | {NOTIFY}, NOTIFYING),
        (["serve"], CALLS | SERVES | TELEMETRY, SENDING),
    ],
    ids=["help", "call", "stdio", "notifying", "telemetry"],
)
def test_a_start_imports_only_what_it_needs(
    words: list[str], needed: set[str], variables: dict[str, str], tmp_path: Path
) -> None:
    """Help needs neither settings nor models, a call no MCP, and a server over stdio nothing of HTTP but the SDK's.

    What notifies or sends telemetry is imported where it is set up, and then by servers alone.
    """
    where = ["--state-dir", str(tmp_path / "state"), "--workspace", str(ROOT / "examples")] if needed else []
    command = [sys.executable, "-I", "-X", "importtime", "-m", "glovebox_server", *words, *where]
    env = {**os.environ, **variables}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == (2 if words[-1] == "none" else 0), done.stderr[-500:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert imported & (CALLS | SERVES | REST | TELEMETRY) == needed
