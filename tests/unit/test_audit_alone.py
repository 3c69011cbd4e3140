"""A stranger verifies a bundle and a receipt with ``glovebox_audit`` alone."""

import subprocess  # noqa: TID251 - a process without our packages
import sys
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / "fixtures" / "logs" / "11a23de"
ABSENT = (
    "glovebox_server", "glovebox_profiles", "_glovebox_guest", "mcp", "mcp_types", "starlette", "uvicorn", "docker",
    "requests", "pydantic_settings", "anyio", "click", "rich", "structlog", "platformdirs", "h11", "httpx2", "jwt",
)  # fmt: skip
PROGRAM = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a module where nothing else is installed."""
    argv = [sys.executable, "-I", "-c", PROGRAM, module, *arguments]
    return subprocess.run(argv, capture_output=True, check=False, text=True)


@pytest.mark.parametrize(
    ("kind", "file", "changed"),
    [("verify-bundle", "bundle.zip", b"run_python"), ("verify-receipt", "receipt.json", b"payloadType")],
)
def test_a_proof_is_verified_where_the_server_is_not_installed(
    kind: str, file: str, changed: bytes, tmp_path: Path
) -> None:
    """It holds; with one byte changed it does not. The control: the server cannot be imported there."""
    found = run("glovebox_audit", kind, str(KEPT / file), "--key", str(KEPT / "key.pub"))
    assert (found.returncode, found.stdout.split()[:2]) == (0, ["PROVED", "with"]), found.stderr
    (tmp_path / file).write_bytes((KEPT / file).read_bytes().replace(changed, changed.swapcase(), 1))
    assert run("glovebox_audit", kind, str(tmp_path / file), "--key", str(KEPT / "key.pub")).returncode == 1
    assert "ModuleNotFoundError: glovebox_server" in run("glovebox_server", "--help").stderr


def test_a_receipt_is_found_in_a_copy_of_its_log() -> None:
    """With the log; a log that is not there is an error, not a proof."""
    asked = ("glovebox_audit", "verify-receipt", str(KEPT / "receipt.json"), "--key", str(KEPT / "key.pub"), "--audit")
    found = run(*asked, str(KEPT / "audit"))
    assert found.returncode == 0, found.stderr
    assert run(*asked, str(KEPT)).returncode == 2
