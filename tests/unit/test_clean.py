"""``glovebox clean``: what is of no use any more goes, what is in use stays, and a dry run changes nothing."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tests.fixtures import segments
from tests.fixtures.artifact_stores import TTL, Clock, a_store, keep
from tests.fixtures.audit_logs import decided

from glovebox_audit.chain import draft
from glovebox_audit.file import LogFile
from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.runtime import guest_gc, runtime
from glovebox_server.cli.main import main

DAYS = 3


@pytest.fixture
def state(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "data"
    (place / "guest-now").mkdir(parents=True)
    now = SimpleNamespace(directories=(place / "runtime-now", place / "guest-now"))
    monkeypatch.setattr(runtime, "every", lambda _: {DEFAULT: now})
    return place


def run(state: Path, data: Path, *options: str, days: float | None = None, mib: int | None = None) -> dict[str, object]:
    env = {"GLOVEBOX_AUDIT_KEEP_DAYS": days, "GLOVEBOX_AUDIT_KEEP_MIB": mib}
    asked = ["clean", "--json", "--state-dir", str(state), "--data-dir", str(data), *options]
    done = CliRunner().invoke(main, asked, env={name: str(value) for name, value in env.items() if value is not None})
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def names(said: dict[str, object]) -> list[tuple[str, str]]:
    items = said["items"]
    assert isinstance(items, list)
    return [(item["kind"], item["name"]) for item in items]


def everything(*places: Path) -> dict[str, tuple[int, int, int]]:
    found = (path for place in places for path in [place, *place.rglob("*")])
    return {str(path): (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}


def old(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "file").write_bytes(b"x" * 1000)
    os.utime(path, (time.time() - 2 * 86400,) * 2)
    return path


async def one_of_each(state: Path, data: Path) -> None:
    """What can go: an expired artifact, an upload and a log's file of killed servers, old segments, an old guest."""
    past = Clock(now=datetime.now(UTC) - 3 * TTL)
    async with a_store(state / "artifacts", past) as store:
        await keep(store, "old.txt", b"x" * 1000)
    old(state / "artifacts" / "incoming" / "gone" / "file")
    segments.fill(state / "audit", 12)
    cut = LogFile(state / "audit", "s_dead", segments.rotation())
    cut.commit([draft(decided("c_cut"))])
    cut.close()
    old(data / "guest-old")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + DAYS * 86400)


KINDS = {"artifact", "upload", "server", "segment", "guest"}


@pytest.mark.usefixtures("later")
async def test_what_can_go_goes_and_is_named(state: Path, data: Path) -> None:
    """Once, with its bytes; the log goes on and verifies, with the cut call lost and the removal on record."""
    await one_of_each(state, data)
    before = everything(state, data)
    shown = run(state, data, "--dry-run", days=1)
    assert everything(state, data) == before  # a dry run changes nothing
    assert {kind for kind, _ in names(shown)} == KINDS
    assert shown["removed"] is False
    done = run(state, data, days=1)
    assert names(done) == names(shown)
    assert done["bytes"] == shown["bytes"]
    assert (data / "guest-now").is_dir()
    for kind, name in names(done):
        assert not ((data if kind == "guest" else state) / name).exists()
    assert names(run(state, data, days=1)) == []
    report = verify(state / "audit")
    assert (report.problems, report.segments) == ((), 0)
    assert report.removed > 0


@pytest.mark.usefixtures("later")
async def test_the_log_is_kept_unless_a_setting_says_otherwise(state: Path, data: Path) -> None:
    """Everything else is of no use whatever the settings are."""
    await one_of_each(state, data)
    lines = segments.all_lines(state / "audit")
    assert {kind for kind, _ in names(run(state, data))} == KINDS - {"segment"}
    assert segments.all_lines(state / "audit")[: len(lines)] == lines
    assert "segment" not in {kind for kind, _ in names(run(state, data, mib=1))}  # it is far smaller than that


@pytest.mark.usefixtures("later")
async def test_what_is_in_use_stays(state: Path, data: Path) -> None:
    """By a server that runs: its upload, its file beside the log, its guest; and an artifact that can be read."""
    audit = state / "audit"
    (state / "artifacts").mkdir(mode=0o700)
    living = LogFile(audit, "s_living", segments.rotation(10**9))
    living.commit([draft(decided("c_running"))])
    used = old(data / "guest-used")
    async with a_store(state / "artifacts", Clock(now=datetime.now(UTC))) as store:
        kept = await keep(store, "new.txt", b"x" * 1000)
        with guest_gc.held([used]):
            assert names(run(state, data, "--dry-run", days=1)) == []
            assert names(run(state, data, days=1)) == []
            assert used.is_dir()
        assert len(list((state / "artifacts" / "incoming").iterdir())) == 1
        assert (state / "artifacts" / "items" / kept.id).exists()
    assert b"call.lost" not in (audit / "audit.jsonl").read_bytes()
    living.close()
    # The control: with the server gone, the same things go.
    assert {kind for kind, _ in names(run(state, data, days=1))} == {"server", "guest"}
    assert b"call.lost" in (audit / "audit.jsonl").read_bytes()


def test_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    """No directory, no key, no log; without a guest of this version no guest is judged."""
    old(tmp_path / "data" / "guest-unknown")
    said = run(tmp_path / "state", tmp_path / "data", "--dry-run")
    assert (names(said), said["bytes"]) == ([], 0)
    assert names(run(tmp_path / "state", tmp_path / "data")) == []
    assert not (tmp_path / "state").exists()
    assert (tmp_path / "data" / "guest-unknown").exists()


async def test_a_person_sees_a_table(state: Path, data: Path) -> None:
    await one_of_each(state, data)
    asked = ["clean", "--dry-run", "--state-dir", str(state), "--data-dir", str(data)]
    text = CliRunner().invoke(main, asked).stdout
    for word in ("artifacts/items/", "expired", "its server is gone", "would be removed"):
        assert word in text


def test_the_file_of_a_server_that_starts_is_left_alone(state: Path, data: Path) -> None:
    """Made and not locked yet: a lock on it, however short, could end that start; with content it goes (control)."""
    LogFile(state / "audit", "s_1").close()
    file = state / "audit" / "writers" / "s_2.json"
    file.touch(mode=0o600)
    assert names(run(state, data, "--dry-run")) == []
    file.write_bytes(b"x")
    assert names(run(state, data, "--dry-run")) == [("server", "audit/writers/s_2.json")]


def test_what_is_no_folder_is_reported(state: Path, data: Path) -> None:
    """A file in a folder's place hides what would be there: not the same as nothing."""
    (state / "artifacts").mkdir()
    (state / "artifacts" / "items").touch()
    asked = ["clean", "--dry-run", "--state-dir", str(state), "--data-dir", str(data)]
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, isinstance(done.exception, NotADirectoryError)) != (0, False)
