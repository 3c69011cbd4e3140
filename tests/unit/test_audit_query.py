"""Questions to the log: what is found, that all of it comes from the log, and that the index can be thrown away."""

import json
import os
import re
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import decided, finished, log_lines, replace_lines

from glovebox_audit import read
from glovebox_audit.chain import Head, draft
from glovebox_audit.event import CallEvent, Event
from glovebox_audit.events import (
    ArtifactCollected,
    CallCancelled,
    CallDecided,
    CallFailed,
    CallLost,
    EgressDecided,
    SandboxStarted,
    StopMade,
)
from glovebox_audit.file import LogFile
from glovebox_audit.query import ask, current, index
from glovebox_audit.query.ask import QueryAnswer, Told
from glovebox_audit.query.index import Filters
from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_audit.receipts.parts import Output
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.segments.rotation import SEGMENT_BYTES
from glovebox_server.cli.main import main

DIGEST = "0123456789abcdef" * 4
ARTIFACT = ArtifactCollected(
    call_id="c_file",
    name="plots/Höhe.png",
    uri="artifact://" + DIGEST[:32],
    sha256=DIGEST,
    bytes=3,
    media_type="image/png",
)
EGRESS = EgressDecided(
    call_id="c_web", scheme="https", host="docs.python.org", port=443, asked_digest="sha256:" + "9" * 64,
    effect="allow", rule="egress.allow",
)  # fmt: skip
MEASURED = SandboxStarted(
    call_id="c_file", sandbox_id="s1", driver="bubblewrap", level="namespaces", plan_digest="sha256:0", verified=True,
    measured={"hostname": "never searched"},
)  # fmt: skip


def begun(call_id: str, **fields: object) -> CallDecided:
    return replace(decided(call_id), **fields)  # type: ignore[arg-type]  # of this class


CALLS: dict[str, tuple[CallEvent, ...]] = {
    "c_ok": (begun("c_ok"), finished("c_ok")),
    "c_exit": (begun("c_exit", client="Cursor"), replace(finished("c_exit"), exit_code=3)),
    "c_time": (begun("c_time"), replace(finished("c_time"), ended="timed_out", exit_code=None)),
    "c_gone": (begun("c_gone"), CallCancelled(call_id="c_gone", by="client", elapsed_ms=1.5)),
    "c_fail": (begun("c_fail"), CallFailed(call_id="c_fail", error="SandboxError", reason="no bwrap", elapsed_ms=1)),
    "c_lost": (
        begun("c_lost"),
        CallLost(call_id="c_lost", cause="log", reason="gone", run_by="s", decided="2026", last="call.decided"),
    ),
    "c_deny": (begun("c_deny", effect="deny", rule="network.allow", reason="No rule names 'evil.example'."),),
    "c_ask": (begun("c_ask", effect="ask", rule="approval.ask"),),
    "c_file": (begun("c_file", principal="token:ci", tool="fetch_url"), MEASURED, ARTIFACT, finished("c_file")),
    "c_web": (
        begun("c_web", principal="token:ci", client="", run="r_1", workflow="release"),
        EGRESS,
        finished("c_web"),
    ),
    "c_runs": (begun("c_runs", arguments={"code": "print('needle in code')\n"}),),
}
#: As a person would say how each came out.
EXPECTED = dict(
    zip(CALLS, ("succeeded", "failed", "timed_out", "cancelled", "error", "lost", "denied", "ask", "succeeded",
                "succeeded", "running"), strict=True)
)  # fmt: skip


def write(directory: Path, *events: Event) -> None:
    file = LogFile(directory, "s_1")
    for event in events:
        file.commit([draft(event)])
    file.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    write(tmp_path / "audit", *(event for events in CALLS.values() for event in events))
    return tmp_path / "audit"


SAID: list[str] = []
TOLD = Told(say=SAID.append, progress=lambda _done, _most: None)


def asked(directory: Path, limit: int = 100, **filters: Any) -> QueryAnswer:
    SAID.clear()
    return ask.ask(directory, Filters(**filters), limit, TOLD)


def found(directory: Path, **filters: Any) -> list[str]:
    return [call.call_id for call in reversed(asked(directory, **filters).calls)]


def test_every_call_is_found_newest_first_with_its_outcome(log: Path) -> None:
    calls = asked(log).calls
    assert {call.call_id: call.outcome for call in calls} == EXPECTED
    assert [call.call_id for call in calls] == list(reversed(CALLS))
    assert set(EXPECTED.values()) <= set(OUTCOMES)
    (failed,) = asked(log, outcomes=("error",)).calls
    assert (failed.error, failed.elapsed_ms, failed.tool) == ("SandboxError", 1, "run_python")


@pytest.mark.parametrize(
    ("filters", "calls"),
    [
        ({"tools": ("fetch_url",)}, ["c_file"]),
        ({"principals": ("token:ci",)}, ["c_file", "c_web"]),
        ({"principals": ("token:ci",), "tools": ("run_python",)}, ["c_web"]),
        ({"clients": ("Cursor",)}, ["c_exit"]),
        ({"clients": ("over http", "Cursor")}, ["c_exit"]),
        ({"runs": ("r_1",)}, ["c_web"]),
        ({"runs": ("r_1",), "tools": ("fetch_url",)}, []),
        ({"runs": ("r_1", "r_2"), "workflows": ("release",)}, ["c_web"]),
        ({"runs": ("r_2",)}, []),
        ({"workflows": ("release", "other")}, ["c_web"]),
        ({"workflows": ("other",)}, []),
        ({"outcomes": ("denied", "ask")}, ["c_deny", "c_ask"]),
        ({"rules": ("network.allow", "approval.ask")}, ["c_deny", "c_ask"]),
        ({"hosts": ("docs.python.org", "other.example")}, ["c_web"]),
        ({"hosts": ("python.org",)}, []),
        ({"hosts": ("docs.python.org",), "text": "needle"}, []),
        ({"outcomes": ("running",)}, ["c_runs"]),
        ({"tools": ("nobody_has_it",)}, []),
        ({"text": "evil.example"}, ["c_deny"]),
        ({"text": "docs.python.org"}, ["c_web"]),
        ({"text": "plots/höhe"}, ["c_file"]),
        ({"text": "needle in code"}, ["c_runs"]),
        ({"text": "sh"}, [*CALLS]),  # too short for an index: every record is read
        ({"text": DIGEST}, ["c_file"]),
        ({"text": DIGEST[:20]}, ["c_file"]),
        ({"text": DIGEST[:40] + "0"}, []),
        ({"text": f"artifact://{DIGEST[:32]}"}, ["c_file"]),
        ({"text": "never searched"}, []),
        ({"text": 'no "such" text'}, []),
        ({"text": "docs.python.org", "outcomes": ("denied",)}, []),
    ],
)
def test_what_is_asked_for_is_found_and_nothing_else(log: Path, filters: dict[str, object], calls: list[str]) -> None:
    assert found(log, **filters) == calls


def test_times_and_a_limit_bound_what_is_found(log: Path) -> None:
    times = {call.call_id: datetime.fromisoformat(call.time) for call in asked(log).calls}
    assert found(log, since=times["c_web"]) == ["c_web", "c_runs"]
    assert found(log, until=times["c_exit"]) == ["c_ok"]
    assert found(log, since=datetime(2100, 1, 1, tzinfo=UTC)) == []
    assert asked(log, limit=2).more
    assert not asked(log, limit=len(CALLS)).more
    assert not asked(log, limit=1, text="evil.example").more


def test_a_query_adds_what_is_new(log: Path) -> None:
    """A call that ran has ended, another began; what was indexed is not read again."""
    asked(log)
    before = (log / index.NAME).stat().st_ino
    write(log, finished("c_runs"), begun("c_new"))
    last = {call.call_id: call.outcome for call in asked(log, limit=2).calls}
    assert last == {"c_new": "running", "c_runs": "succeeded"}
    assert found(log, text="needle in code") == ["c_runs"]
    assert (log / index.NAME).stat().st_ino == before


async def test_a_server_has_the_index_take_in_what_the_log_grew_by(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own, once for each segment; who asks then has nothing to index, until more was written."""
    ran: list[Any] = []
    run = anyio.run_process

    async def counted(command: Any, **how: Any) -> None:
        ran.append(command)
        assert (await run(command, **how)).returncode == 0

    monkeypatch.setattr(anyio, "run_process", counted)
    monkeypatch.setattr(current, "_SECONDS", 0)
    heads = [Head(size=SEGMENT_BYTES + more) for more in (-1, 0, 1, SEGMENT_BYTES - 1)]
    with pytest.raises(IndexError):
        await current.follow(lambda: heads.pop(0), log)
    assert len(ran) == 1
    indexed: list[int] = []
    told = Told(say=SAID.append, progress=lambda done, _: indexed.append(done))
    assert len(ask.ask(log, Filters(), 100, told).calls) == len(CALLS)
    assert indexed == []
    write(log, begun("c_new"))
    ask.ask(log, Filters(), 100, told)
    assert len(indexed) == 1


def test_what_lies_in_a_gap_is_not_found(log: Path) -> None:
    lines = log_lines(log)
    with (log / LOG_NAME).open("ab") as handle:
        handle.write(b"{torn\n" + lines[0] + b"{torn")
    assert found(log) == [*CALLS, "c_ok"]
    write(log, begun("c_after"))
    assert found(log) == [*CALLS, "c_after"]


def test_a_log_put_in_place_of_another_makes_a_new_index(log: Path, tmp_path: Path) -> None:
    asked(log)
    write(tmp_path / "other", begun("c_other"), *(begun(f"c_{number}") for number in range(40)))
    (tmp_path / "other" / LOG_NAME).replace(log / LOG_NAME)
    assert found(log)[0] == "c_other"
    replace_lines(log, log_lines(log)[:3])
    assert len(found(log)) == 3


def _rubbish(path: Path) -> None:
    path.write_bytes(b"rubbish" * 1000)


def test_calls_are_counted_by_the_index_as_they_come_and_end(log: Path) -> None:
    """The same as all that is found; of one kind, or one caller; and after a call that ran has ended."""

    def totals(**filters: Any) -> tuple[dict[tuple[str, str], int], int]:
        found = ask.totals(log, Filters(**filters), TOLD)
        return dict(found.calls), found.callers

    every = Counter((call.tool, call.outcome) for call in asked(log).calls)
    assert totals() == (every, 2)
    assert totals(principals=("token:ci",)) == ({("fetch_url", "succeeded"): 1, ("run_python", "succeeded"): 1}, 1)
    assert totals(outcomes=("running",)) == ({("run_python", "running"): 1}, 1)
    write(log, finished("c_runs"))
    assert totals(outcomes=("running",)) == ({}, 0)
    assert totals()[0]["run_python", "succeeded"] == every["run_python", "succeeded"] + 1


def test_what_stands_around_a_call_is_found_by_what_it_names(log: Path) -> None:
    """A stop, by its id; nothing of a call, and not what names something else. A place that lies makes a new index."""
    stop = StopMade(stop="s_1", scope="all", name="", because="c_ok sent mail", by="local:0")
    write(log, stop, replace(stop, stop="s_2"))

    def around(*names: str) -> list[object]:
        return [each.data["stop"] for each in ask.about(log, names, TOLD)]

    assert (around("s_2", "s_1"), around("s_3"), around("c_ok")) == (["s_1", "s_2"], [], [])
    _statement("UPDATE about SET place = 0")(log / index.NAME)
    assert around("s_1") == ["s_1"]


def _zeros_inside(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)


def _no_text(path: Path) -> None:
    # A table whose description is broken, with a name in it that SQLite repeats and that is no text.
    content = path.read_bytes().replace(b"CREATE TABLE state", b"CREATE TABXE \x8atate")
    path.write_bytes(content.replace(b"state", b"\x8atate"))


def _statement(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return change


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        _rubbish,
        _no_text,
        _zeros_inside,
        _statement("PRAGMA user_version = 99"),
        _statement("CREATE TABLE more (x)"),
        _statement("CREATE TRIGGER t AFTER INSERT ON calls BEGIN DELETE FROM calls; END"),
        _statement("DROP TABLE texts"),
        _statement("UPDATE calls SET first = first + 1"),
        _statement("UPDATE calls SET first = 0"),
        _statement("UPDATE calls SET first = first + 0.5, last = 'x'"),
        _statement("UPDATE calls SET last = first WHERE last IS NOT NULL"),
        _statement("UPDATE calls SET last = NULL"),
        _statement("UPDATE calls SET outcome = (SELECT outcome FROM calls WHERE id = 7)"),
        _statement("UPDATE calls SET first = 1 << 60"),
        _statement("UPDATE state SET until = until + 1"),
        _statement("UPDATE state SET until = 'x'"),
        _statement("UPDATE state SET until = NULL"),
        _statement("UPDATE state SET line = x'00'"),
    ],
)
def test_an_index_that_lies_is_made_again(log: Path, change: Callable[[Path], None]) -> None:
    assert found(log, outcomes=("denied",)) == ["c_deny"]
    change(log / index.NAME)
    assert {call.call_id: call.outcome for call in asked(log).calls} == EXPECTED
    assert found(log, outcomes=("denied",)) == ["c_deny"]
    assert SAID == []


def test_ids_that_lie_are_made_again(log: Path) -> None:
    asked(log)
    _statement("UPDATE calls SET call = 'c_deny' WHERE id = (SELECT max(id) FROM calls)")(log / index.NAME)
    assert ask.named(log, "c_de", TOLD) == ["c_deny"]
    _statement("UPDATE calls SET call = ''")(log / index.NAME)
    assert [each.call_id for each in ask.records(log, "c_deny", TOLD)] == ["c_deny"], "an index cannot hide a call"


def test_a_record_that_was_changed_is_left_out_and_counted(log: Path) -> None:
    """It is not shown as if it were so, and makes no new index each time; the control is the same call before."""
    assert found(log, outcomes=("denied",)) == ["c_deny"]
    replace_lines(log, [line.replace(b"evil.example", b"good.example") for line in log_lines(log)])
    answer = asked(log)
    assert answer.damaged == 1
    code, _, err = run("audit", "query", "--state-dir", log.parent)
    assert (code, "1 call left out: the record was changed" in err) == (1, True)
    assert "c_deny" not in {call.call_id for call in answer.calls}
    made = (log / index.NAME).stat().st_ino
    assert asked(log).damaged == 1
    assert (log / index.NAME).stat().st_ino == made


def test_the_index_is_its_owners_alone(log: Path) -> None:
    """0600 whatever the umask; a link, or one open to others, is not used, and the answer comes without it."""
    old = os.umask(0)
    try:
        asked(log)
    finally:
        os.umask(old)
    path = log / index.NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert len(found(log)) == len(CALLS)
    assert "is not a file of our own alone" in SAID[0]
    path.unlink()
    target = log.parent / "target"
    target.write_bytes(b"")
    path.symlink_to(target)
    assert len(found(log)) == len(CALLS)
    assert "made in memory" in SAID[0]
    assert target.read_bytes() == b""


def test_where_it_cannot_be_kept_it_is_made_in_memory(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(index, "_create", refused)
        assert {call.call_id: call.outcome for call in asked(log).calls} == EXPECTED
        said = "The index of the log is made in memory, for this command alone, and not kept"
        assert [f"{said}: Permission denied."] == SAID
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert len(found(log)) == len(CALLS)
        assert "another user's" in SAID[0]
    connected = index._connected

    @contextmanager
    def small(path: str) -> Iterator[sqlite3.Connection]:
        with connected(path) as connection:
            if path != ":memory:":
                connection.execute("PRAGMA max_page_count = 20")
            yield connection

    monkeypatch.setattr(index, "_connected", small)
    write(log, *(begun(f"c_{number}", reason=os.urandom(500).hex(" ")) for number in range(50)))
    assert len(found(log)) == len(CALLS) + 50
    assert "database or disk is full" in SAID[0]


def test_questions_at_the_same_time_wait_for_each_other(log: Path) -> None:
    answers: list[int] = []

    def ask_often() -> None:
        answers.extend(len(ask.ask(log, Filters(tools=("run_python",)), 100, TOLD).calls) for _ in range(5))

    threads = [threading.Thread(target=ask_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(30):
        write(log, begun(f"c_more{number}"))
    for thread in threads:
        thread.join()
    assert len(answers) == 20
    assert max(answers) <= 10 + 30
    assert len(found(log)) == len(CALLS) + 30


def test_one_that_is_held_too_long_is_not_waited_for(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process must not stop the others."""
    monkeypatch.setattr(index, "LOCK_WAIT_SECONDS", 0.05)
    with index.locked(log, SAID.append):
        assert len(found(log)) == len(CALLS)
        assert "held its lock" in SAID[-1]


def test_without_trigrams_every_call_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_TEXTS", "CREATE VIRTUAL TABLE texts USING no_such_module(text)")
    assert found(log, text="docs.python.org") == ["c_web"]
    assert found(log, text=DIGEST) == ["c_file"]


def test_what_is_indexed_in_pieces_is_the_same(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_COMMIT_BYTES", 500)
    monkeypatch.setattr(index, "_MOST_OPEN", 0)
    assert {call.call_id: call.outcome for call in asked(log).calls} == EXPECTED
    assert found(log, text="needle in code") == ["c_runs"]
    assert found(log, text="docs.python.org") == ["c_web"]


def test_a_call_is_named_by_its_beginning_or_as_the_last_and_its_records_lie_between_its_ends(log: Path) -> None:
    for call_id in CALLS:
        assert ask.records(log, call_id, TOLD) == list(read.records_of(log, call_id))
    assert ask.named(log, "last", TOLD) == ["c_runs"]
    assert ask.named(log, "c_we", TOLD) == ["c_web"]
    assert sorted(ask.named(log, "c_f", TOLD)) == ["c_fail", "c_file"]
    assert ask.named(log, "c_none", TOLD) == []
    write(log, begun("c_web2"))
    assert ask.named(log, "c_web", TOLD) == ["c_web"]


def run(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def test_the_command_prints_a_table_or_json(log: Path) -> None:
    state = log.parent
    code, out, err = run("audit", "query", "--outcome", "denied", "--outcome", "failed", "--state-dir", state)
    assert (code, err) == (0, "")
    assert "denied: network.allow" in out
    assert "failed: exit 3" in out
    assert re.search(r"c_exit .* Cursor +\d", out)
    assert "over stdio" in out  # of whom no client is known
    code, out, _ = run("audit", "query", "--client", "Cursor", "--json", "--state-dir", state)
    told = json.loads(out)
    assert (code, told["more"], told["damaged"]) == (0, False, 0)
    assert (told["calls"][0]["call_id"], told["calls"][0]["exit_code"]) == ("c_exit", 3)
    code, out, _ = run("audit", "query", "--client", "over stdio", "--limit", "99", "--json", "--state-dir", state)
    over = [each["call_id"] for each in json.loads(out)["calls"]]
    assert (code, "c_ok" in over, "c_exit" in over) == (0, True, False)
    assert "there are more (--limit)" in run("audit", "query", "--limit", "1", "--state-dir", state)[2]
    assert run("audit", "query", "--tool", "none", "--state-dir", state)[:2] == (0, "No call fits.\n")
    times = ("--since", "1h", "--until", "2100-01-01")
    assert run("audit", "query", "--grep", "HÖHE", *times, "--state-dir", state)[0] == 0
    for wrong in (("--since", "tomorrow"), ("--since", "99999999d"), ("--outcome", "fine"), ("--limit", "0")):
        assert run("audit", "query", *wrong, "--state-dir", state)[0] == 2


def test_show_is_a_page_for_a_person(log: Path) -> None:
    state = log.parent
    differs = {"field": "seccomp", "planned": 2, "inside": 0, "verdict": "differs"}
    refused = replace(MEASURED, call_id="c_bad", verified=False, fields=({"field": "uid", "verdict": "ok"}, differs))
    failed = CallFailed(call_id="c_bad", error="SandboxError", reason="it is not what was planned", elapsed_ms=2)
    write(log, begun("c_bad"), refused, failed)
    _, out, _ = run("audit", "show", "last", "--state-dir", state)
    assert run("audit", "show", "--state-dir", state)[1] == out
    assert "NOT as planned, so nothing ran; 1 of 2 fields hold" in out
    assert "seccomp: differs (planned 2, inside 0)" in out
    assert "ended     error, SandboxError, it is not what was planned" in out
    _, out, _ = run("audit", "show", "c_fil", "--state-dir", state)
    order = [out.index(word) for word in ("asked", "decided", "measured", "gave", "spent", "ended", "records")]
    assert order == sorted(order)
    assert f"plots/Höhe.png, 3 bytes, image/png, artifact://{DIGEST[:32]}, never readable" in out
    _, out, _ = run("audit", "show", "c_web", "--state-dir", state)
    assert "asked     connect https://docs.python.org:443 by the rule egress.allow, no answer on record" in out
    _, out, _ = run("audit", "show", "c_runs", "--state-dir", state)
    assert "needle in code" in out
    write(log, begun("c_json"), replace(finished("c_json"), outputs=(Output(name="value", bytes=50, digest=DIGEST),)))
    _, out, _ = run("audit", "show", "c_json", "--state-dir", state)
    assert "gave      the result as JSON, 50 bytes" in out
    code, _, err = run("audit", "show", "c_f", "--state-dir", state)
    assert (code, "c_fail, c_file" in err) == (2, True)
    _, out, _ = run("audit", "show", "c_file", "--json", "--state-dir", state)
    assert [json.loads(line)["kind"] for line in out.splitlines()] == [event.kind for event in CALLS["c_file"]]
