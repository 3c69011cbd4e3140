"""``glovebox backup`` and ``restore``: what comes back, what never does, and what no archive can do."""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess  # noqa: TID251 - an interpreter of its own
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.fixtures import states
from tests.fixtures.audit_logs import decided, log_lines
from tests.fixtures.states import Filled, held, left, spend

from glovebox_audit import chain, place, read
from glovebox_audit.file import LogFile
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import anchor
from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.artifacts import record
from glovebox_server.artifacts.record import Disk
from glovebox_server.cli.main import main
from glovebox_server.guards.approvals import store as approvals
from glovebox_server.guards.approvals.store import Questions
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.guards.stops.stops import stops_of
from glovebox_server.guards.watch.canaries import canaries_of
from glovebox_server.promotion import transaction
from glovebox_server.promotion.folder import TargetFolder
from glovebox_server.transport import tokens
from glovebox_server.upkeep import backup
from glovebox_server.upkeep.archive import MANIFEST, ArchiveWriter

LEFT_OUT = (
    "worker/", "notify/", "preloads/", "unforeseen", "artifacts/incoming", "artifacts/totals", "audit/index",
    "tokens/.used",
)  # fmt: skip


@pytest.fixture
async def filled(tmp_path: Path) -> Filled:
    """A state directory with one of everything."""
    return await states.fill(tmp_path)


def run(state: Path, *words: object) -> tuple[int, dict[str, Any], str]:
    """Call the command; its exit code, what it prints as JSON, and the sentence if it fails."""
    done = CliRunner().invoke(main, [*map(str, words), "--json", "--state-dir", str(state)])
    body = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.exit_code, body, str((body.get("error") or {}).get("message", done.output))


def kept(filled: Filled, *options: str) -> Path:
    """Make a backup."""
    file = filled.state.with_name(f"backup{len([*filled.state.parent.glob('backup*')])}")
    code, told, words = run(filled.state, "backup", file, *options)
    assert (code, told.get("file")) == (0, str(file)), words
    return file


def kinds(state: Path) -> list[str]:
    """The kinds of all records."""
    return [chain.parse(line).kind for line in log_lines(state / "audit")]


def questions(state: Path) -> dict[str, str]:
    """The state of each question, by id."""
    with approvals.opened(state) as store:
        found = store.query_now(lambda one: Questions(one, read_clocks()).standings())
    return {each.question.id: each.state for each in found}


async def test_everything_comes_back_and_nothing_that_was_open_is(filled: Filled, tmp_path: Path) -> None:
    """0600, verifies, ends with what it was; what is made again is not in it, and the source stays as it was."""
    source = held(filled.state)
    file = kept(filled)
    assert held(filled.state) == source
    assert file.stat().st_mode & 0o777 == 0o600
    target = tmp_path / "elsewhere"
    code, told, _ = run(target, "restore", file)
    assert code == 0
    assert told == {
        "by": f"local:{os.getuid()}", "made": told["made"], "head": anchor(read.head(filled.state / "audit")),
        "before": None, "withdrawn": 2, "tokens_left_out": [], "replaced": None,
    }  # fmt: skip
    assert verify(target / "audit").ok
    assert kinds(target)[-4:] == ["call.lost", "approval.withdrawn", "approval.withdrawn", "state.restored"]
    back = held(target)
    same = {name for name in source if not name.startswith((*LEFT_OUT, "governance/a", "governance/b", "audit/"))}
    assert {name: back[name] for name in same} == {name: source[name] for name in same}
    assert back["audit/audit.jsonl"].startswith(source["audit/audit.jsonl"])
    assert back["audit/segments/000001.jsonl"] == source["audit/segments/000001.jsonl"]
    assert {name for name in back if name.startswith(LEFT_OUT)} == set()
    assert {path.stat().st_mode & 0o077 for path in [target, *target.rglob("*")]} == {0}
    states_of = questions(target)
    assert {name: states_of[each.id] for name, each in filled.questions.items()} == {
        "pending": "withdrawn", "allowed": "withdrawn", "denied": "denied", "used": "used",
    }  # fmt: skip
    assert questions(filled.state)[filled.questions["allowed"].id] == "allowed"
    assert left(target) == left(filled.state)
    assert stops_of(target).read().items == (filled.stop,)
    assert canaries_of(target).read() == canaries_of(filled.state).read()
    assert transaction.listed(target) == transaction.listed(filled.state)
    assert {path.name for path in tmp_path.iterdir()} == {
        "state", "elsewhere", "backup0", "reports", "canary.env",
    }  # fmt: skip
    assert run(filled.state, "backup", file)[0] == 2  # it exists: nothing is replaced


async def test_a_backup_without_keys_gets_those_that_are_there(filled: Filled, tmp_path: Path) -> None:
    """Neither keys nor canaries are in it; where there are none, new ones are made. The control is one with keys."""
    bare, whole = kept(filled, "--without-keys"), kept(filled)
    keys = {name: content for name, content in held(filled.state).items() if name.startswith("keys/")}
    assert len(keys) == 3
    for content in (*keys.values(), canaries_of(filled.state).read().items[0].marker.encode()):
        assert content not in bare.read_bytes()
        assert content in whole.read_bytes()
    assert run(tmp_path / "new", "restore", bare)[0] == 0
    assert held(tmp_path / "new")["keys/receipts.pem"] != keys["keys/receipts.pem"]
    assert run(filled.state, "restore", bare)[0] == 0
    assert {name: held(filled.state)[name] for name in keys} == keys
    assert len(canaries_of(filled.state).read().items) == 1  # the present directory's stay


async def test_what_was_taken_away_since_stays_taken_away(filled: Filled) -> None:
    """Stops, tokens, approvals and spending since; what was there before is kept beside, as it was."""
    file = kept(filled)
    tokens.revoke(filled.state / "tokens", "old")
    tokens.revoke(filled.state / "tokens", "ci")
    tokens.create(filled.state / "tokens", "ci")  # another of that name
    stops_of(filled.state).remove(filled.stop.id)
    since = states.stop(filled.state, "token:worse")
    spend(filled.state, "b", 7)
    states.record(filled.settings, decided("c_9"))
    now, head = held(filled.state), anchor(read.head(filled.state / "audit"))
    code, told, _ = run(filled.state, "restore", file)
    assert (code, told["before"], told["tokens_left_out"]) == (0, head, ["ci", "old"])
    assert held(Path(told["replaced"])) == now
    assert tokens.load(filled.state / "tokens", None) == {}
    assert stops_of(filled.state).read().items == (filled.stop, since)
    assert left(filled.state) == 1000 - 10
    assert verify(filled.state / "audit").ok
    (event,) = [each for each in map(chain.parse, log_lines(filled.state / "audit")) if each.kind == "state.restored"]
    assert event.data["before"] == head
    assert kinds(filled.state)[-3:] == ["token.revoked", "token.revoked", "state.restored"]
    spend(filled.state, "c", 5)  # and a second backup, with more, is not spent less
    later = kept(filled)
    shutil.rmtree(filled.state)
    Path(told["replaced"]).rename(filled.state)
    assert run(filled.state, "restore", later)[0] == 0
    assert left(filled.state) == 1000 - 15


async def test_no_server_may_be_live_nor_start(filled: Filled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refused while one is, or holds the log's lock, which one that starts waits for; the control is without them."""
    monkeypatch.setattr(place, "LOCK_WAIT_SECONDS", 0.05)
    file, before = kept(filled), held(filled.state)
    async with AuditLog.open(filled.state / "audit", "s_live"):
        code, _, words = run(filled.state, "restore", file)
        assert (code, "1 live server there (s_live). Stop them first" in words) == (4, True)
    assert {name: content for name, content in held(filled.state).items() if "audit" not in name} == {
        name: content for name, content in before.items() if "audit" not in name
    }
    with (filled.state / "audit/head.json").open("rb") as head:
        fcntl.flock(head, fcntl.LOCK_EX)
        code, _, words = run(filled.state, "restore", file)
        assert (code, "another process has held its lock" in words) == (4, True)
    exchange = TargetFolder.exchange

    def starting(folder: TargetFolder, one: str, other: str) -> None:
        with pytest.raises(AuditError, match="another process has held its lock"):
            LogFile(filled.state / "audit", "s_starting")
        exchange(folder, one, other)

    monkeypatch.setattr(TargetFolder, "exchange", starting)
    assert run(filled.state, "restore", file)[0] == 0

    def mounted(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    now, around = held(filled.state), sorted(tmp_path.iterdir())
    monkeypatch.setattr(TargetFolder, "exchange", mounted)
    code, _, words = run(filled.state, "restore", file)
    assert (code, "Device or resource busy; nothing was changed. Name another directory" in words) == (4, True)
    assert (held(filled.state), sorted(tmp_path.iterdir())) == (now, around)


@pytest.mark.parametrize("kind", ["stop", "token", "canary"])
async def test_what_cannot_be_read_of_the_present_directory_is_not_forgotten(filled: Filled, kind: str) -> None:
    """A damaged stop stops everything: a restore does not lift it. The control is the same without it."""
    file = kept(filled)
    place = {"stop": "governance/stops/s_", "token": "tokens/t", "canary": "governance/canaries/y_"}[kind]
    damaged = filled.state / f"{place}{'0' * 26}"
    damaged.write_text("{}")
    damaged.chmod(0o600)
    before = held(filled.state)
    code, _, words = run(filled.state, "restore", file)
    assert (code, damaged.name in words) == (4, True)
    assert held(filled.state) == before
    assert not (filled.state.parent / ".state.restoring").exists()
    damaged.unlink()
    assert run(filled.state, "restore", file)[0] == 0


def member(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """One file of an archive, with whatever header."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def split(file: Path) -> dict[str, bytes]:
    """What is in a backup."""
    with tarfile.open(file) as found:
        return {each.name: found.extractfile(each).read() for each in found}  # type: ignore[union-attr]  # all are files


def joined(parts: dict[str, bytes], *, tail: bytes = bytes(1024), honest: bool = True) -> bytes:
    """A backup of these files; with a manifest that says the same, if it is honest."""
    told = json.loads(parts[MANIFEST])
    body = {name: content for name, content in parts.items() if name != MANIFEST}
    if honest:
        told["files"] = {name: [len(each), hashlib.sha256(each).hexdigest()] for name, each in body.items()}
    return b"".join(member(*each) for each in body.items()) + member(MANIFEST, json.dumps(told).encode()) + tail


ARTIFACT = "artifacts/items/" + "0" * 32
PROMOTION = "p_" + "1" * 20
STOP = "governance/stops/s_" + "0" * 26
Parts = dict[str, bytes]


def _with(name: str, content: bytes, **fields: Any) -> Callable[[Parts], bytes]:
    return lambda parts: member(name, content, **fields) + joined(parts)


def _put(name: str, content: bytes, *, honest: bool = True) -> Callable[[Parts], bytes]:
    return lambda parts: joined({**parts, name: content}, honest=honest)


def _moving(parts: Parts) -> bytes:
    (content,) = [content for name, content in parts.items() if name.endswith(".json") and "/p_" in name]
    identifier = json.loads(content)["id"]
    moving = content.replace(b'"applied"', b'"moving"').replace(identifier.encode(), PROMOTION.encode())
    return joined({**parts, f"promotions/{PROMOTION}.json": moving})


def _edit(name: str, old: bytes, new: bytes) -> Callable[[Parts], bytes]:
    return lambda parts: joined({**parts, name: parts[name].replace(old, new, 1)})


HOSTILE: dict[str, tuple[Callable[[Parts], bytes], str]] = {
    "empty": (lambda _: b"", "it is cut off"),
    "zeros": (lambda _: bytes(1 << 16), "a header in it is none, or is cut off"),
    "not a tar": (lambda _: os.urandom(1 << 16), "a header in it is none, or is cut off"),
    "up": (_with("../x", b"x"), "../x is no file of a state directory"),
    "up below": (_with("tokens/../../x", b"x"), "tokens/../../x is no file of a state directory"),
    "absolute": (_with("/etc/x", b"x"), "/etc/x is no file of a state directory"),
    "dot": (_with("./tokens/x", b"x"), "./tokens/x is no file of a state directory"),
    "line": (_with("tokens/x\n", b"x"), r"tokens/x\n is no file of a state directory"),
    "not text": (_with("tokens/\udcff", b"x"), "a header in it is none, or is cut off"),
    "profile": (_with("profiles/run_python.toml", b"x"), "profiles/run_python.toml is no file of a state directory"),
    "socket": (_with("worker/sock", b"x"), "worker/sock is no file of a state directory"),
    "link": (_with("tokens/x", b"", type=tarfile.SYMTYPE, linkname="/etc/shadow"), "tokens/x is a link, a device,"),
    "hard link": (_with("tokens/x", b"", type=tarfile.LNKTYPE, linkname="tokens/ci"), "tokens/x is a link, a device,"),
    "device": (_with("tokens/x", b"", type=tarfile.CHRTYPE, devmajor=1), "tokens/x is a link, a device,"),
    "pipe": (_with("tokens/x", b"", type=tarfile.FIFOTYPE), "tokens/x is a link, a device,"),
    "folder": (_with("tokens/x", b"", type=tarfile.DIRTYPE), "tokens/x"),
    "long name": (_with("a" * 300, b"x"), "././@LongLink is a link, a device,"),
    "sparse": (_with("tokens/x", b"", type=tarfile.GNUTYPE_SPARSE), "tokens/x is a link, a device,"),
    "mode": (_with("tokens/x", b"x", mode=0o4755), "the header of tokens/x is not as it was written"),
    "owner": (_with("tokens/x", b"x", uname="root"), "the header of tokens/x is not as it was written"),
    "large token": (_with("tokens/x", bytes(2000)), "tokens/x claims 2000 bytes"),
    "larger than itself": (_with("audit/audit.jsonl", b"", size=1 << 35), "audit/audit.jsonl claims 34359738368 bytes"),
    "twice": (lambda parts: member(STOP, b"{}") + member(STOP, b"{}") + joined(parts), f"{STOP} is in it twice"),
    "cut": (lambda parts: joined(parts)[:-1500], "it is cut off"),
    "no end": (lambda parts: joined(parts, tail=b""), "it is cut off"),
    "more": (lambda parts: joined(parts) + b"x", "something follows its end"),
    "no manifest": (lambda parts: joined(parts).partition(MANIFEST.encode())[0], "is cut off"),
    "another manifest": (_put("tokens/ci", b"x" * 300, honest=False), "tokens/ci is not as its manifest says"),
    "manifest": (lambda parts: joined({**parts, MANIFEST: b'{"format": [[]], "made": 7}'}), "its manifest is none"),
    "newer": (
        lambda parts: joined({**parts, MANIFEST: parts[MANIFEST].replace(b'"format": 1', b'"format": 2')}),
        "its form is not this version's. Restore it with the version of Glovebox that made it.",
    ),
    "stop": (_put(STOP, b"{}"), f"stop {STOP}: it is not what was written"),
    "token": (_put("tokens/ci", b"{}"), "token file tokens/ci: it does not hold what"),
    "artifact": (_put(f"{ARTIFACT}/content", b"x"), f"the record and the content of artifact://{'0' * 32} do not fit"),
    "store": (_put("governance/approvals.sqlite", b"SQLite format 3\0" + bytes(4096)), "governance/approvals.sqlite"),
    "empty store": (_put("governance/budgets.sqlite", b""), "governance/budgets.sqlite: it is damaged: it is empty"),
    "key": (_put("keys/receipts.pem", b"x"), "receipt key keys/receipts.pem: it does not hold an Ed25519"),
    "promotion": (_put("promotions/p_" + "0" * 20 + ".json", b"{}"), "journal of promotions promotions/p_"),
    "a promotion that has not ended": (_moving, f"the promotion {PROMOTION} has not ended"),
    "log": (_edit("audit/audit.jsonl", b"c_under_way", b"c_other_way"), "audit"),
    "segment": (_edit("audit/segments/000001.jsonl", b"c_1", b"c_2"), "audit/segments/000001.jsonl:"),
    "no log": (lambda parts: joined({name: parts[name] for name in parts if "audit/" not in name}), "audit"),
}  # fmt: skip


async def test_no_archive_does_more_than_its_files_say(filled: Filled, tmp_path: Path) -> None:
    """Each is refused with what is wrong, nothing changes, and nothing is left; the control is put together alike."""
    file = kept(filled)
    parts, before, around = split(file), held(filled.state), sorted(tmp_path.iterdir())
    assert joined(parts, honest=False) == file.read_bytes()
    bad = tmp_path / "bad"
    for name, (make, reason) in HOSTILE.items():
        bad.write_bytes(make(dict(parts)))
        code, _, words = run(filled.state, "restore", bad)
        bad.unlink()
        assert (code, name, reason in words) == (4, name, True), words
        assert words.startswith(("Reading the backup: ", "Checking the backup: ")), words
        assert ".restoring" not in words
        assert held(filled.state) == before
        assert sorted(tmp_path.iterdir()) == around, name
    os.mkfifo(bad)
    assert "it is cut off" in run(filled.state, "restore", bad)[2]
    assert run(filled.state, "restore", file)[0] == 0


@pytest.mark.parametrize("damage", ["stop", "token", "artifact", "log", "lock", "none"])
async def test_a_backup_of_what_is_damaged_says_so_and_is_not_there(
    filled: Filled, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is left, whole or half; the control is what is damaged nowhere."""
    monkeypatch.setattr("glovebox_audit.place.LOCK_WAIT_SECONDS", 0.05)
    file, state = tmp_path / "file", filled.state
    content = next((state / "artifacts/items").glob("*/content"))
    with ExitStack() as stack:
        if damage == "lock":
            lock = stack.enter_context((state / "audit/head.json").open("rb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if damage in ("stop", "token"):
            path = state / ("tokens/t" if damage == "token" else f"governance/stops/s_{'0' * 26}")
            path.write_text("{}")
            path.chmod(0o600)
        if damage == "artifact":
            content.write_bytes(content.read_bytes()[:-1] + b"!")
        if damage == "log":
            with (state / "audit/audit.jsonl").open("ab") as log:
                log.write(b"{}\n")
        code, _, words = run(state, "backup", file)
    expected = {
        "stop": "it is not what was written", "token": "it does not hold what", "artifact": "its content is not what",
        "log": "Reading the end of the audit log: it is damaged", "lock": "another process has held its lock",
        "none": "",
    }  # fmt: skip
    assert (code == 0, expected[damage] in words) == (damage == "none", True), words
    assert file.exists() == (damage == "none")
    assert [*tmp_path.glob(".file.*")] == []


def test_what_changes_while_it_is_read_is_in_no_backup() -> None:
    """Nor what does not belong there: an archive that could not be restored is not made; the control is what does."""
    out = ArchiveWriter(io.BytesIO())
    out.add("tokens/x", 3, [b"a", b"bc"])
    changed, other = "it was changed while it was read", "it is not expected there"
    for name, size, reason in (
        ("tokens/y", 4, changed), ("tokens/x", 3, other), ("tokens/z", 2000, other), ("worker/sock", 3, other),
    ):  # fmt: skip
        with pytest.raises(DiagnosedError, match=reason):
            out.add(name, size, [b"abc"])
    assert out.files == {"tokens/x": [3, hashlib.sha256(b"abc").hexdigest()]}


async def test_a_torn_line_is_left_out_and_a_lagging_head_is_no_damage(filled: Filled, tmp_path: Path) -> None:
    """As a crash leaves them; the record before is the last in the backup. So is a promotion that was interrupted."""
    (ended,) = transaction.listed(filled.state)
    moving = replace(ended, id=PROMOTION, state="moving")
    (filled.state / f"promotions/{PROMOTION}.json").write_bytes(transaction.encode(moving))
    (filled.state / f"promotions/{PROMOTION}.json").chmod(0o600)
    head = filled.state / "audit/head.json"
    earlier = head.read_bytes()
    states.record(filled.settings, decided("c_8"))
    now = anchor(read.head(filled.state / "audit"))
    head.write_bytes(earlier)
    with (filled.state / "audit/audit.jsonl").open("ab") as log:
        log.write(b'{"torn')
    code, told, _ = run(tmp_path / "new", "restore", kept(filled))
    assert (code, told["head"], transaction.listed(tmp_path / "new")) == (0, now, [ended])
    assert verify(tmp_path / "new/audit").gaps == 0


async def test_what_is_recorded_before_it_is_seen_has_its_record_in_the_backup(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between every two parts, a server writes: the log of the backup is never older than what it tells of."""
    order: list[str] = []
    for name in ("_add_artifacts", "_add_stores", "_add_log", "_add_small"):
        real = getattr(backup, name)

        def noted(*given: Any, _real: Any = real, _name: str = name, **named: Any) -> Any:
            order.append(_name)
            states.record(filled.settings, decided(f"c_{_name}"))
            if _name == "_add_small":
                states.stop(filled.state, "token:late")
                tokens.revoke(filled.state / "tokens", "old")
            return _real(*given, **named)

        monkeypatch.setattr(backup, name, noted)
    assert run(tmp_path / "new", "restore", kept(filled))[0] == 0
    assert order == ["_add_artifacts", "_add_stores", "_add_log", "_add_small"]
    calls = {chain.parse(line).call_id for line in log_lines(tmp_path / "new/audit")}
    assert {"c__add_artifacts", "c__add_stores", "c__add_log"} <= calls
    assert "c__add_small" not in calls
    assert [each.name for each in stops_of(tmp_path / "new").read().items] == ["token:bad", "token:late"]
    assert set(tokens.load(tmp_path / "new/tokens", None)) == {"ci"}


async def test_an_artifact_that_expires_meanwhile_is_left_out(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its record: neither alone would be one."""
    listed = record.records

    def gone(root: Path, now: Any) -> Any:
        found = listed(root, now)
        Disk(root, max_bytes_total=0, parts=1)
        shutil.rmtree(root / "items" / found[0].id)
        return found

    monkeypatch.setattr(record, "records", gone)
    assert not [name for name in split(kept(filled)) if name.startswith("artifacts/")]


async def test_a_server_that_waits_for_the_lock_finds_its_log_replaced(filled: Filled) -> None:
    """Whoever opened the log before the exchange writes nothing to the old one after it."""
    file = kept(filled)
    with closing(LogFile(filled.state / "audit", "s_early")) as early:
        (filled.state / "audit/writers/s_early.json").unlink()  # so that it is not seen as live
        assert run(filled.state, "restore", file)[0] == 0
        with pytest.raises(AuditError, match="its files were removed or replaced while it was in use"):
            early.commit([chain.draft(decided("c_late"))])


def test_the_module_is_not_imported_by_a_server() -> None:
    """A server that is never backed up has none of it."""
    code = "import sys, glovebox_server.cli.serve, glovebox_server.transport.serve; print([*sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "glovebox_server.upkeep.readiness" in found
    assert {name for name in ("backup", "restore", "archive") if f"glovebox_server.upkeep.{name}'" in found} == set()
