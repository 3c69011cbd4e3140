"""Promotions: all files or none, whatever happens midway; nobody's change is lost; every one can be put back."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.promoting import AFTER, BEFORE, FILES, Place, a_place, folders, held

from glovebox_audit.event import Event
from glovebox_audit.events import PromotionApplied, PromotionRolledBack
from glovebox_audit.place import AuditError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server import app as apps
from glovebox_server.promotion import transaction
from glovebox_server.promotion.folder import TargetFolder
from glovebox_server.promotion.transaction import Journal, roll_back
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.upkeep import log as promotions

_STEPS: tuple[tuple[type, str], ...] = (
    (Journal, "save"), (Journal, "keep"), (Journal, "forget"), (TargetFolder, "write"), (TargetFolder, "make"),
    (TargetFolder, "move"), (TargetFolder, "exchange"), (TargetFolder, "sync"),
    (TargetFolder, "unmake"), (TargetFolder, "clear"),
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder with files in it, and a journal."""
    with a_place(tmp_path) as found:
        yield found


def stepping(monkeypatch: pytest.MonkeyPatch, step: Callable[[str], None]) -> None:
    """Call ``step`` before and after everything that touches a disk."""
    for owner, name in _STEPS:
        real = getattr(owner, name)

        def wrapped(*args: object, _real: Callable[..., object] = real, _name: str = name, **options: object) -> object:
            step(_name)
            found = _real(*args, **options)
            step(_name)
            return found

        monkeypatch.setattr(owner, name, wrapped)


def child(act: Callable[[], object]) -> int:
    """Do something in a process of its own; its id."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return pid


def killed_after(steps: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Do something in a process that is killed behind so many steps; how that ended, 0 where it came to its end."""
    count = 0

    def die(_: str) -> None:
        nonlocal count
        count += 1
        if count > steps:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        stepping(monkeypatch, die)
        act()

    return os.waitpid(child(run), 0)[1]


def require_whole(place: Place) -> str:
    """Recover, and say which of the two it is: nothing between them, and nothing left lying about."""
    place.recover()
    found = held(place.folder)
    assert found in (BEFORE, AFTER)
    applied = found == AFTER
    assert folders(place.folder) == ({"there", "deep", "deep/down"} if applied else {"there"})
    assert [each.state for each in place.promotions] in ([], ["applied" if applied else "withdrawn"])
    assert place.recover() == []
    return "after" if applied else "before"


def test_all_files_change_and_all_go_back(place: Place) -> None:
    """Changed, added and removed files; modes are kept; the record stands before the first file is touched."""
    (place.folder / "changed.txt").chmod(0o644)
    at_record: list[dict[str, bytes]] = []

    def record(event: Event) -> None:
        at_record.append({name: data for name, data in held(place.folder).items() if not name.startswith(".")})
        place.events.append(event)

    done = place.promote(record=record)
    assert held(place.folder) == AFTER
    assert at_record == [BEFORE]
    (event,) = place.events
    assert isinstance(event, PromotionApplied)
    assert [each.name for each in event.files] == list(FILES)
    assert (place.folder / "changed.txt").stat().st_mode & 0o777 == 0o644
    assert done.state == "applied"
    assert require_whole(place) == "after"


@pytest.mark.parametrize("name", ["changed.txt", "gone.txt", "there/changed.csv"])
def test_what_changed_since_it_was_shown_is_a_conflict(place: Place, name: str) -> None:
    """Nothing is changed, and the file is named; no record, since nothing was about to happen."""
    promotion = place.drafted()
    (place.folder / name).write_bytes(b"mine")
    now = held(place.folder)
    with pytest.raises(RefusedError, match=name) as caught:
        place.promote(promotion)
    assert caught.value.rule == "promotion.conflict"
    assert held(place.folder) == now
    assert place.events == []


@pytest.mark.parametrize("name", ["changed.txt", "deep/down/more.txt", "gone.txt"])
def test_what_changes_in_the_last_moment_is_a_conflict_too(place: Place, name: str) -> None:
    """Between the look and the exchange: what came out is looked at again, and all goes back as it then was."""

    def record(event: Event) -> None:
        place.events.append(event)
        path = place.folder / name
        if isinstance(event, PromotionApplied):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"mine")

    with pytest.raises(RefusedError) as caught:
        place.promote(record=record)
    assert caught.value.rule in ("promotion.conflict", "promotion.disk")
    assert held(place.folder) == BEFORE | {name: b"mine"}
    assert isinstance(place.events[-1], PromotionRolledBack)
    assert place.events[-1].because == "failed"
    assert place.recover() == []


def link(path: Path) -> None:
    """Put a link to another folder in the way."""
    outside = path.parent.parent / "outside"
    outside.mkdir()
    path.symlink_to(outside)


def linked_file(path: Path) -> None:
    """Replace a file by a link to another."""
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def named_twice(path: Path) -> None:
    """Give a file a second name."""
    os.link(path, path.with_suffix(".other"))


def fifo(path: Path) -> None:
    """Put a FIFO in the way."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("deep", link, "is a link, or no folder"),
        ("deep", lambda path: path.write_bytes(b""), "is a link, or no folder"),
        ("changed.txt", linked_file, "is a link, or no plain file"),
        ("changed.txt", named_twice, "has other names"),
        ("changed.txt", fifo, "no plain file"),
    ],
)
def test_a_way_through_anything_but_folders_is_refused(
    place: Place, name: str, damage: Callable[[Path], None], told: str
) -> None:
    """A link on the way, a file in place of a folder, a link, a FIFO or a hard link in place of the file."""
    promotion = place.drafted()
    damage(place.folder / name)
    with pytest.raises(RefusedError, match=told) as caught:
        place.promote(promotion)
    assert caught.value.rule == "promotion.path"
    assert not (place.folder.parent / "outside").exists() or not list((place.folder.parent / "outside").iterdir())
    assert place.events == []


def test_another_file_system_on_the_way_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount below the folder: files there could not be exchanged. The control is the first test."""
    promotion = place.drafted()
    real = os.fstat
    there = (place.folder / "there").stat().st_ino

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        if found.st_ino != there:
            return found
        return os.stat_result([*found[:2], found.st_dev + 1, *found[3:10]])

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(RefusedError, match="another file system") as caught:
        place.promote(promotion)
    assert caught.value.rule == "promotion.path"


@pytest.mark.parametrize(("owner", "method"), [(TargetFolder, "write"), (Journal, "keep"), (TargetFolder, "exchange")])
def test_a_full_disk_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """Of the folder or of the state directory; the reason is named."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(owner, method, full)
    with pytest.raises(RefusedError, match="No space left") as caught:
        place.promote()
    assert caught.value.rule == "promotion.disk"
    assert require_whole(place) == "before"


def test_what_cannot_be_recorded_does_not_happen(place: Place) -> None:
    """The log comes first."""

    def record(_: Event) -> None:
        raise AuditError("recording", "the disk is full", "Free space.")

    with pytest.raises(AuditError):
        place.promote(record=record)
    assert require_whole(place) == "before"


def test_everything_lies_ready_and_is_recorded_before_a_file_is_touched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut needs: contents and journal on the disk, then the exchange, then the journal again."""
    steps: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        steps.append("fsync")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    stepping(monkeypatch, steps.append)
    place.promote(record=lambda _: steps.append("record"))
    touched = [index for index, each in enumerate(steps) if each in ("move", "exchange")]
    recorded = steps.index("record")
    assert max(index for index, each in enumerate(steps) if each in ("keep", "write")) < recorded < touched[0]
    for begun in (index for index, each in enumerate(steps) if each in ("keep", "write") and index < recorded):
        assert "fsync" in steps[begun:recorded]
    assert "save" in steps[recorded : touched[0]]
    after = steps[touched[-1] :]
    assert after.index("sync") < after.index("save")
    assert "fsync" in after[: after.index("save")]


@pytest.mark.long
def test_a_process_that_dies_at_any_step_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before and after everything that touches a disk, one step later each time, until it gets to the end."""
    outcomes = []
    for last in range(500):
        directory = tmp_path / str(last)
        directory.mkdir()
        with a_place(directory) as place, monkeypatch.context() as patched:
            status = killed_after(last, place.promote, patched)
        outcomes.append(require_whole(place))
        if status == 0:
            break
    assert outcomes == sorted(outcomes, reverse=True)  # from one step on it is in effect
    assert outcomes.count("before") > 20
    assert outcomes.count("after") > 3


def killed_before_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promote, and be killed when all files are exchanged and the journal does not say so yet."""
    real = Journal.save

    def die(journal: Journal, promotion: transaction.Promotion) -> None:
        if promotion.state == "moved":
            os.kill(os.getpid(), signal.SIGKILL)
        real(journal, promotion)

    def act() -> None:
        monkeypatch.setattr(Journal, "save", die)
        place.promote()

    os.waitpid(child(act), 0)
    assert [each.state for each in place.promotions] == ["moving"]


@pytest.mark.long
def test_a_recovery_that_dies_at_any_step_is_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed amid a promotion, and again while it was put back, one step later each time."""
    for last in range(200):
        directory = tmp_path / str(last)
        directory.mkdir()
        with a_place(directory) as place, monkeypatch.context() as patched:
            killed_before_the_end(place, patched)
            status = killed_after(last, place.recover, patched)
        assert require_whole(place) == "before"
        if status == 0:
            break
    assert last > 10


def test_kills_leave_all_or_nothing(tmp_path: Path, kills: int) -> None:
    """SIGKILL at any moment, whatever it was doing; of many, both ends are seen, and promotions cut in two."""
    seconds = []
    for number in range(5):
        (tmp_path / f"t{number}").mkdir()
        with a_place(tmp_path / f"t{number}") as place:
            begun = time.monotonic()
            os.waitpid(child(place.promote), 0)
            seconds.append(time.monotonic() - begun)
    outcomes, cut = [], 0
    chance = random.Random(14)  # noqa: S311 - a test's
    for number in range(kills):
        directory = tmp_path / str(number)
        directory.mkdir()
        with a_place(directory) as place:
            pid = child(place.promote)
            time.sleep(chance.uniform(0, 1.2 * sorted(seconds)[2]))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        cut += any(each.state not in transaction.ENDED for each in place.promotions)
        outcomes.append(require_whole(place))
    assert len(outcomes) == kills
    assert kills < 100 or (cut > 10 and set(outcomes) == {"before", "after"})


def test_what_somebody_changed_after_a_crash_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not overwritten by putting back: it is named, and what was there before is kept. The rest goes back."""
    killed_before_the_end(place, monkeypatch)
    (place.folder / "changed.txt").write_bytes(b"mine")
    (found,) = place.recover()
    assert found.promotion.kept == ("changed.txt",)
    assert "changed.txt" in str(found)
    assert held(place.folder) == BEFORE | {"changed.txt": b"mine"}
    assert (place.state / "promotions" / found.promotion.id / "0").read_bytes() == BEFORE["changed.txt"]
    assert place.recover() == []


async def test_a_server_puts_back_what_was_interrupted_before_it_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On record, and before its own first record. The control: where a command is at it, it is left alone."""
    killed_before_the_end(place, monkeypatch)
    assert {**held(place.folder), **AFTER} == held(place.folder)
    settings = Settings(state_dir=place.state, workspace=place.folder, profiles_dir=SHIPPED, data_dir=tmp_path / "data")
    with transaction.locked(place.state):
        promotions.recover(settings)
        assert [each.state for each in place.promotions] == ["moving"]
    async with apps.opened(settings, "http"):
        assert held(place.folder) == BEFORE
    kinds = [json.loads(line)["kind"] for line in log_lines(place.state / "audit")]
    assert kinds[:2] == ["promotion.rolled_back", "server.started"]
    assert require_whole(place) == "before"


def test_what_cannot_be_cleared_away_changes_nothing_of_what_is_in_force(place: Place) -> None:
    """A folder that somebody made beside what was laid ready: all is said to be in effect until it is gone."""

    def record(event: Event) -> None:
        assert isinstance(event, PromotionApplied)
        (place.folder / f".glovebox-promotion-{event.promotion}/x").mkdir()

    done = place.promote(record=record)
    assert done.state == "moved"
    assert {**held(place.folder), **AFTER} == held(place.folder)
    (found,) = place.recover()
    assert found.promotion.state in transaction.IN_FORCE
    assert "is in effect, but what was laid ready cannot be cleared away yet: " in str(found)
    assert "nothing was changed" not in str(found)
    assert held(place.folder) == AFTER  # what it replaced does not lie about
    (place.folder / done.stage / "x").rmdir()
    (found,) = place.recover()
    assert (found.promotion.state in transaction.IN_FORCE, found.problem) == (True, "")
    assert require_whole(place) == "after"


@pytest.mark.parametrize("fails", [False, True], ids=["in effect", "put back"])
def test_what_cannot_be_cleared_away_is_in_nobodys_way(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """The next is promoted and put back, and so is that one: only what is still to be put back holds others up."""

    def record(event: Event) -> None:
        if isinstance(event, PromotionApplied):
            (place.folder / f".glovebox-promotion-{event.promotion}/x").mkdir()

    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(TargetFolder, "exchange", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
            with pytest.raises(RefusedError, match="No space left"):
                place.promote(record=record)
        else:
            place.promote(record=record)
    (left,) = place.promotions
    assert left.state == ("undone" if fails else "moved")
    (found,) = place.recover()
    assert found.settled
    assert f"{'was put back' if fails else 'is in effect'}, but what was laid ready cannot be cleared" in str(found)
    transaction.require_settled([found])
    if fails:
        done = place.promote()
    with transaction.locked(place.state) as journal:
        roll_back(journal, done.id if fails else left.id, place.events.append)
    assert held(place.folder) == BEFORE


def test_what_is_still_to_be_put_back_holds_others_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its folder is away. The control: it is there again."""
    killed_before_the_end(place, monkeypatch)
    place.folder.rename(place.folder.with_name("away"))
    with pytest.raises(RefusedError) as caught:
        transaction.require_settled(place.recover())
    assert caught.value.rule == "promotion.interrupted"
    place.folder.with_name("away").rename(place.folder)
    transaction.require_settled(place.recover())
    assert held(place.folder) == BEFORE


def test_only_one_at_a_time_and_by_a_journal_that_is_what_was_written(place: Place) -> None:
    """Whoever comes second waits a little, and is then told; nothing is guessed."""
    with (
        transaction.locked(place.state),
        pytest.raises(RefusedError) as caught,
        transaction.locked(place.state, seconds=0.1),
    ):
        pass
    assert caught.value.rule == "promotion.busy"
    place.promote()
    (path,) = (place.state / "promotions").glob("*.json")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SecretFileError, match="not what was written"):
        place.recover()


@pytest.mark.parametrize("identifier", ["../../elsewhere", "p_" + "0" * 20], ids=["outside", "another"])
def test_a_journal_names_no_folder_but_its_own(place: Place, identifier: str) -> None:
    """Its id is what is cleared away; the control is the same file with its own."""
    kept = place.state.parent / "elsewhere"
    kept.mkdir()
    (kept / "file").write_text("precious")
    place.promote()
    (path,) = (place.state / "promotions").glob("*.json")
    written = path.read_text()
    path.write_text(written.replace(path.stem, identifier).replace('"applied"', '"undone"'))
    with pytest.raises(SecretFileError, match="not what was written"):
        place.recover()
    assert (kept / "file").read_text() == "precious"
    path.write_text(written)
    assert place.recover() == []


def test_the_oldest_promotions_are_forgotten(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept to be put back does not grow for ever."""
    monkeypatch.setattr(transaction, "MAX_KEPT", 2)
    for _ in range(4):
        place.fill()
        for name in ("deep/down/added.txt", "deep/down/more.txt"):
            (place.folder / name).unlink(missing_ok=True)
        place.promote()
    assert len(place.promotions) == 2
    assert len([each for each in (place.state / "promotions").iterdir() if each.is_dir()]) == 2
