"""Patches onto a real folder: exactly what the program made, or nothing."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.fixtures.artifact_stores import Clock, a_store, keep
from tests.fixtures.promoting import held
from tests.fixtures.whole_commands import GLOVEBOX
from tests.unit.test_promotion_commands import POLICY, addresses, run

from _glovebox_guest.files import changes
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.diff_form import NO_ID
from glovebox_server.exits import OK, REFUSED, USAGE
from glovebox_server.promotion.plan import _id, made
from glovebox_server.promotion.transaction import ENDED

STARTED = 8  # whole processes that are killed, at the most: seconds each
OLD: Mapping[str, bytes] = {
    "a.txt": b"".join(b"line %d\n" % number for number in range(60)),
    "no end.txt": b"one\ntwo",
    "deep/b.bin": bytes(range(256)) * 40,
    "gone.py": b"print()\n",
    "run.sh": b"#!/bin/sh\n",
    "cr.txt": b"a\r\nb\rc\x0bd\ne\n",
    "empty": b"",
}
NEW: Mapping[str, bytes] = {
    "a.txt": OLD["a.txt"].replace(b"line 3\n", b"LINE 3\nmore\n").replace(b"line 50\n", b""),
    "no end.txt": b"one\nthree",
    "deep/b.bin": bytes(range(255, -1, -1)) * 40,
    "run.sh": b"#!/bin/sh\necho\n",
    "cr.txt": b"a\r\nb\rC\x0bd\ne\n",
    "empty": b"no more\n",
    "new/made.txt": b"made\n",
    "new/made.bin": b"\0" * 3000,
}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Have a folder hold these files, and no others."""
    for name in held(folder) if folder.exists() else ():
        (folder / name).unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def overlay_patch(tmp_path: Path) -> bytes:
    """As the guest makes it of a program's changes."""
    source, target = write(tmp_path / "source", OLD), tmp_path / "target"
    target.mkdir()
    original = changes.WorkspaceCopy(str(source), str(target), max_files=1000, max_bytes=1 << 20)
    write(target, NEW)
    (target / "run.sh").chmod(0o755)
    summary, patch = original.compare(1 << 20)
    assert summary["skipped"] == []
    return patch


def reading(files: Mapping[str, bytes]) -> Callable[[str], bytes | None]:
    """What is there."""
    return files.get


def test_what_is_made_is_what_the_program_had(tmp_path: Path) -> None:
    """Text, bytes, no last line end, carriage returns, new and removed files; the second time it is there already."""
    patch = overlay_patch(tmp_path)
    found = made(patch, reading(OLD))
    assert {each.name: each.content for each in found} == {**NEW, "gone.py": None}
    again = made(patch, reading(NEW))
    assert {each.name: each.content for each in again} == {**NEW, "gone.py": None}


@pytest.mark.parametrize(
    ("name", "now", "told"),
    [
        ("a.txt", OLD["a.txt"].replace(b"line 30", b"mine"), "not what the program was given"),
        ("a.txt", None, "it is not there"),
        ("deep/b.bin", b"mine", "not what the program was given"),
        ("gone.py", b"print()\nmore\n", "not what the program was given"),
        ("gone.py", b"other\n", "not what the program was given"),
        ("new/made.txt", b"mine\n", "not what the program was given"),
        ("run.sh", b"#!/bin/sh\nmine\n", "not what the program was given"),
    ],
)
def test_what_changed_since_is_a_conflict(tmp_path: Path, name: str, now: bytes | None, told: str) -> None:
    """Also where the patch would fit: a line far from what it changes is enough. The control is the test above."""
    files = {**OLD, name: now}
    with pytest.raises(RefusedError, match=told) as caught:
        made(overlay_patch(tmp_path), files.get)
    assert caught.value.rule == "promotion.conflict"


@pytest.mark.parametrize("guess", [b"SECRET=1", b"other"])
def test_nobody_guesses_at_single_lines(guess: bytes) -> None:
    """A file's lines are compared with nothing before its id is; the control names that of the whole file."""
    held = b"other\nSECRET=1\n"
    patch = b"diff --git a/x b/x\ndeleted file mode 100644\nindex %b..%b\n--- a/x\n+++ /dev/null\n@@ -1,%d +0,0 @@\n%b"
    with pytest.raises(RefusedError, match="it is not what the program was given") as caught:
        made(patch % (_id(guess), NO_ID, 1, b"-" + guess + b"\n"), {"x": held}.get)
    assert caught.value.rule == "promotion.conflict"
    (gone,) = made(patch % (_id(held), NO_ID, 2, b"-other\n-SECRET=1\n"), {"x": held}.get)
    assert gone.content is None


HEAD = b"diff --git a/x b/x\nnew file mode 100644\nindex %b..%b\n--- /dev/null\n+++ b/x\n@@ -0,0 +1,1 @@\n+x\n" % (
    NO_ID,
    _id(b"x\n"),
)


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        b"hello\n",
        HEAD[:-1],
        HEAD.replace(b"100644", b"120000"),
        HEAD.replace(b"/x", b"/../x"),
        HEAD.replace(b"/x", b"/.git/hooks/x"),
        HEAD.replace(b"/x", b"/sub/.GIT/config"),
        HEAD.replace(b"+++ b/x", b"+++ b/y"),
        HEAD + HEAD,
        b"diff --git a/y b/y\nold mode 100644\nnew mode 100755\n--- a/y\n+++ b/y\n@@ -1,1 +1,2 @@\n y\n+y\n",
        HEAD.replace(b"+x\n", b"+y\n"),
        HEAD + b"@@ -0,0 +1,1 @@\n+x\n",
        HEAD.replace(b"+1,1", b"+1,2"),
        b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n",
        b"diff --git a/x b/x\nnew file mode 100644\nindex " + b"0" * 40 + b".." + b"1" * 40 + b"\nGIT binary patch\n"
        b"literal 1\nIc${MXU|?VX0RR91\n\n",
        b"diff --git a/x b/x\nnew file mode 100644\nindex " + b"0" * 40 + b".." + b"1" * 40 + b"\nGIT binary patch\n"
        b"literal 999999999\nIc${MXU|?VX0RR91\n\n",
    ],
)
def test_anything_else_is_no_patch_of_ours(patch: bytes) -> None:
    """Cut off, links, ways out, git's own folder, renames, two parts for one file, false sizes and digests."""
    with pytest.raises(RefusedError) as caught:
        made(patch, reading({"y": b"y\n"}))
    assert caught.value.rule == "promotion.patch"


def test_the_control_is_applied() -> None:
    """The same patch with nothing wrong."""
    assert [(each.name, each.content) for each in made(HEAD, reading({}))] == [("x", b"x\n")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A state directory with a program's changes, and the folder that it was given."""
    for name in ("config/profiles", "reports", "work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config/policy.toml").write_text(POLICY.format(folder=tmp_path / "reports"))
    (tmp_path / "state").mkdir(mode=0o700)
    write(tmp_path / "reports", OLD)
    store(tmp_path, overlay_patch(tmp_path / "work"))
    return tmp_path


def store(place: Path, patch: bytes) -> None:
    """Keep a patch as an artifact."""

    async def fill() -> None:
        async with a_store(place / "state/artifacts", Clock(datetime.now(UTC))) as kept:
            await keep(kept, "changes.patch", patch)

    asyncio.run(fill())


def applied(place: Path) -> tuple[int, str]:
    """The patch, by command."""
    words = ("promote", *addresses(place), "--apply", "--into", "reports", "--json")
    status, text = run(place, *words)
    if status != REFUSED or "plan" not in text:
        return status, text
    return run(place, *words, "--expect", json.loads(text)["plan"]["digest"])


def test_a_programs_changes_reach_the_workspace_and_go_again(place: Path) -> None:
    """Shown, applied, found there already, put back."""
    status, text = run(place, "promote", *addresses(place), "--apply", "--into", "reports")
    assert status == REFUSED
    assert "gone.py: goes" in text
    assert "│ +LINE 3" in text
    assert "it may be run as a program" in text
    assert "text/plain, mode 644 → 755" in text
    status, text = applied(place)
    assert status == OK, text
    assert held(place / "reports") == NEW
    assert (place / "reports/run.sh").stat().st_mode & 0o111
    assert json.loads(applied(place)[1])["plan"]["files"] == []
    assert run(place, "rollback", json.loads(text)["promotion"]["id"])[0] == OK
    assert held(place / "reports") == OLD
    assert not (place / "reports/run.sh").stat().st_mode & 0o111


def test_a_change_of_nothing_but_the_mode_is_said(place: Path) -> None:
    """No line shows it, so a sentence does."""
    known = addresses(place)
    (place / "reports/run.sh").chmod(0o755)
    same = _id(OLD["run.sh"])
    store(place, b"diff --git a/run.sh b/run.sh\nold mode 100755\nnew mode 100644\nindex %b..%b\n" % (same, same))
    (uri,) = set(addresses(place)) - set(known)
    status, text = run(place, "promote", uri, "--apply", "--into", "reports")
    assert status == REFUSED
    assert "run.sh: changes, 10 → 10 bytes, text/plain, mode 755 → 644\n" in text
    assert "  No line changes.\n" in text


def test_a_conflict_changes_nothing(place: Path) -> None:
    """Of all files, for one that is not what the program was given."""
    (place / "reports/a.txt").write_bytes(b"mine\n")
    now = held(place / "reports")
    status, text = applied(place)
    assert (status, "promotion.conflict" in text) == (REFUSED, True)
    assert held(place / "reports") == now


def test_one_patch_at_a_time(place: Path) -> None:
    """Two could change the same file."""
    assert run(place, "promote", *addresses(place) * 2, "--apply", "--into", "reports")[0] == USAGE


def options(place: Path) -> tuple[str, ...]:
    """Where its state is."""
    return ("--state-dir", str(place / "state"), "--profiles-dir", str(place / "config/profiles"))


def forked(place: Path, words: list[str]) -> int:
    """The command in a process that has imported everything; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            run(place, *words)
        finally:
            os._exit(0)
    return pid


def started(place: Path, words: list[str]) -> int:
    """The command as a user starts it; the process's id."""
    command = [*GLOVEBOX, "artifact", *words, *options(place)]
    nowhere = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in (0, 1, 2)]
    return os.posix_spawn(command[0], command, {"PATH": os.environ["PATH"], "HOME": str(place)}, file_actions=nowhere)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "earliest"), [(forked, 0.0), (started, 0.5)])
def test_killed_commands_leave_all_or_nothing(
    place: Path, kills: int, start: Callable[[Path, list[str]], int], earliest: float
) -> None:
    """SIGKILL of ``artifact promote --apply`` at any moment: the next command finds all or none, and says which."""
    words = ["promote", *addresses(place), "--apply", "--into", "reports", "--json"]
    words += ["--expect", json.loads(run(place, *words)[1])["plan"]["digest"]]
    rounds = kills if start is forked else min(kills // 3, STARTED)
    chance, usual, outcomes, cut = random.Random(56), 0.0, [], 0  # noqa: S311 - a test's
    for number in range(-1, rounds):
        begun = time.monotonic()
        pid = start(place, words)
        if number >= 0:
            time.sleep(usual * chance.uniform(earliest, 1.1))
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        usual = usual or time.monotonic() - begun
        cut += any(each["state"] not in ENDED for each in records(place))
        status, text = run(place, "promotions", "--json")
        assert status == OK, text
        found = held(place / "reports")
        assert found in (OLD, NEW)
        outcomes.append(found == NEW)
        in_force = [
            each
            for each in json.loads(text[text.index("{\n") :])["promotions"]
            if each["state"] == "applied" and not each["puts_back"] and not each["put_back_by"]
        ]
        assert len(in_force) == (found == NEW)
        if in_force:
            assert run(place, "rollback", in_force[0]["id"])[0] == OK
            assert held(place / "reports") == OLD
    assert outcomes[0]  # nobody killed the first
    assert len(outcomes) == rounds + 1
    assert rounds < 100 or (cut > 5 and set(outcomes[1:]) == {True, False})


def records(place: Path) -> list[dict[str, str]]:
    """The journal as it lies there, which nobody has recovered."""
    return [json.loads(each.read_bytes()) for each in (place / "state/promotions").glob("p_*.json")]
