"""I9, I13: what the kernel shares between sandboxes, and what it counts for them, in whole calls on every driver."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.fixtures.brokered import DRIVERS, Glovebox, profile

from glovebox_server import app as apps
from glovebox_server.settings import Settings


@asynccontextmanager
async def served(directory: Path, driver: str) -> AsyncIterator[Glovebox]:
    """A server for the workspace below a directory."""
    own, workspace = directory / "profiles", directory / "workspace"
    own.mkdir()
    workspace.mkdir(mode=0o755)
    with sqlite3.connect(workspace / "data.db") as base:
        base.execute("create table t(x)")
        base.execute("insert into t values (5)")
    base.close()
    text = profile("run_python", driver).replace("[network]", '[files]\nworkspace = "read"\n[network]')
    (own / "run_python.toml").write_text(text)
    settings = Settings(workspace=workspace, profiles_dir=own, state_dir=directory / "state")
    async with apps.opened(settings, "cli") as app:
        yield Glovebox(app)


READS = """
import sqlite3
print(sqlite3.connect("/workspace/data.db").execute("select x from t").fetchone())
own = sqlite3.connect("/tmp/own.db")
own.execute("attach '/workspace/data.db' as given")
print(own.execute("select x from given.t").fetchone())
try:
    sqlite3.connect("file:/workspace/data.db?vfs=unix", uri=True).execute("select x from t")
except sqlite3.OperationalError as problem:
    print(problem)
"""
KILLED = """
import os, sqlite3
sqlite3.connect("/tmp/a.db").execute("create table t(x)")
if os.fork() == 0:
    sqlite3.connect("/tmp/a.db").execute("insert into t values (1)")
    os.abort()
os.wait()
sqlite3.connect("/tmp/a.db", timeout=0).execute("select x from t")
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_databases_are_read_though_no_file_can_be_locked(driver: str, tmp_path: Path) -> None:
    """A database of the workspace, where nothing can be written, by itself and beside one of the program's own.

    The control is SQLite's usual way, which asks the kernel for a lock. What a killed process leaves locked is said.
    """
    async with served(tmp_path, driver) as glovebox:
        called = await glovebox.call("run_python", code=READS)
        assert called.fields["stdout"]["text"].splitlines() == ["(5,)", "(5,)", "disk I/O error"]
        called = await glovebox.call("run_python", code=KILLED)
        assert called.fields["error"]["message"].startswith("database is locked\n(Who made the directory NAME.lock")


BURNS = """
import os, signal, time
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError:
    pass # where nobody else counts, no program may
reading, writing = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        while time.process_time() < 0.2:
            pass
        os._exit(os.write(writing, b"x") - 1)
    os.read(reading, 1)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_receipt_says_what_children_used_that_nobody_waited_for(driver: str, tmp_path: Path) -> None:
    """I13: 1.6 seconds by the programs' own clocks; it said a few milliseconds. The control does nothing.

    gVisor's clock goes on while its processor is taken by others, so there the host's count is less.
    """
    async with served(tmp_path, driver) as glovebox:
        burnt, idle = [(await glovebox.call("run_python", code=code)).usage for code in (BURNS, "1")]
        assert burnt["cpu_ms"] >= (500 if driver == "gvisor" else 1600)
        assert idle["cpu_ms"] < burnt["cpu_ms"] / 2
        assert burnt["cpu_from"] in ("group", "guest")
        assert burnt["memory_from"] in ("group", "guest")
