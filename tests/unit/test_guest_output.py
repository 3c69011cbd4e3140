"""Collecting a hostile ``/output``: what is sent, what is skipped and why, and that it always ends. No sandbox."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path

import pytest

from _glovebox_guest import wire
from _glovebox_guest.files import output
from _glovebox_guest.files.output import MAX_DEPTH, MAX_SKIPPED, collect
from _glovebox_guest.loop import Loop
from _glovebox_guest.pictures.smaller import share


class Host:
    """The host's end in a thread: takes what comes, gives credit, refuses the names it is told to."""

    def __init__(self, refuse: frozenset[str] = frozenset()) -> None:
        to_guest, self._out = os.pipe()
        self._in, from_guest = os.pipe()
        self.files: dict[str, bytearray] = {}
        self.announced: dict[str, int] = {}
        self.cut: set[str] = set()
        self._names: dict[int, str] = {}
        self._refuse = refuse
        self._wire = wire.Wire("host")
        self.loop = Loop(to_guest, from_guest, "")
        self._ends = (to_guest, from_guest)
        os.write(from_guest, self.loop.wire.message("ready", {}))
        self._wire.receive(os.read(self._in, 4096))
        os.write(self._out, self._wire.message("job", {}))
        self.loop.step(None)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while data := os.read(self._in, 1 << 20):
            for event in self._wire.receive(data):
                self._take(event)

    def _take(self, event: wire.WireEvent) -> None:
        what, stream, *said = event
        if what == "open":
            name = said[0]["meta"]["name"]
            self._names[stream] = name
            self.announced[name] = said[0]["meta"]["bytes"]
            self.cut |= {name} if said[0]["meta"].get("cut") else set()
            if name in self._refuse:
                os.write(self._out, self._wire.reset(stream, {}))
            else:
                self.files[name] = bytearray()
        elif what == "data":
            self.files[self._names[stream]] += said[0]
            os.write(self._out, self._wire.consumed(stream, len(said[0])))

    def close(self) -> None:
        """End it; afterwards everything that was sent has been taken."""
        to_guest, from_guest = self._ends
        with suppress(EOFError):
            self.loop.flush()
        os.close(from_guest)
        self._thread.join()  # it may still give credit, so the other direction stays open until it is done
        for end in (to_guest, self._out, self._in):
            os.close(end)
        for descriptor in self.loop.descriptors - set(self._ends):
            os.close(descriptor)


@pytest.fixture
def guest_signals() -> Iterator[None]:
    import signal  # noqa: PLC0415

    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


pytestmark = pytest.mark.usefixtures("guest_signals")


def collected(
    root: Path, *, max_files: int = 8, max_bytes: int = 10_000_000, refuse: frozenset[str] = frozenset()
) -> tuple[dict[str, bytes], dict[str, str]]:
    host = Host(refuse)
    try:
        skipped, _ = collect(host.loop, str(root), max_files=max_files, max_bytes=max_bytes)
    finally:
        host.close()
    left = {str(each["name"]): str(each["reason"]) for each in skipped}
    return {name: bytes(content) for name, content in host.files.items()}, left


def test_what_lies_too_deep_for_a_path_is_named(tmp_path: Path) -> None:
    """A program gets there step by step, and nobody else; the control lies one folder higher."""
    with chdir(tmp_path):
        while len(str(here := Path.cwd())) < 3846:
            (here / ("d" * 240)).mkdir()
            os.chdir("d" * 240)
        Path("near").write_bytes(b"x")
        Path("f" * 250).write_bytes(b"x")
    sent, skipped = collected(tmp_path)
    assert [Path(name).name for name in sent] == ["near"]
    assert list(skipped.values()) == ["cannot be looked at: its path may be too long"]


def test_regular_files_are_sent_whole(tmp_path: Path) -> None:
    """The control: nested, empty, larger than a window, of any mode that the guest's user can read or make readable."""
    large = os.urandom(3 * wire.WINDOW + 17)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large").write_bytes(large)
    (tmp_path / "a" / "large").chmod(0o400)
    (tmp_path / "empty").touch()
    (tmp_path / "a").chmod(0)
    sent, skipped = collected(tmp_path)
    assert (sent, skipped) == ({"a/large": large, "empty": b""}, {})


def test_what_is_no_regular_file_is_skipped_and_opened_by_nobody(tmp_path: Path) -> None:
    """Links to files, to folders, to nowhere and to themselves; FIFOs; sockets."""
    (tmp_path / "good").write_text("x")
    (tmp_path / "to-file").symlink_to("/etc/passwd")
    (tmp_path / "to-folder").symlink_to("/etc")
    (tmp_path / "to-nowhere").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        sent, skipped = collected(tmp_path)
    assert sent == {"good": b"x"}
    assert skipped == {
        **dict.fromkeys(("loop", "to-file", "to-folder", "to-nowhere"), "a symbolic link"),
        **dict.fromkeys(("fifo", "socket"), "not a regular file"),
    }


def test_a_file_with_two_names_is_skipped(tmp_path: Path) -> None:
    """F3: it may be a hard link to something else."""
    (tmp_path / "a").write_text("x")
    os.link(tmp_path / "a", tmp_path / "b")
    assert collected(tmp_path) == ({}, dict.fromkeys("ab", "has more than one name (hard link)"))


def test_a_sparse_giant_costs_nothing(tmp_path: Path) -> None:
    """F6: its size counts, not what is on the disk; smaller files after it still come."""
    with (tmp_path / "a-giant").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "b").write_text("x")
    assert collected(tmp_path) == ({"b": b"x"}, {"a-giant": "larger than what is left of the output limit"})


def test_all_files_together_stay_within_the_limit(tmp_path: Path) -> None:
    for name, size in (("a", 6), ("b", 5), ("c", 4)):
        (tmp_path / name).write_bytes(bytes(size))
    sent, skipped = collected(tmp_path, max_bytes=10)
    assert (list(sent), list(skipped)) == (["a", "c"], ["b"])


def test_more_files_than_the_limit_are_named_and_counted(tmp_path: Path) -> None:
    """MAX_SKIPPED by name, the rest as a number: a flood of names is no way out either."""
    for n in range(200):
        (tmp_path / f"{n:03}").touch()
    sent, skipped = collected(tmp_path, max_files=3)
    assert list(sent) == ["000", "001", "002"]
    assert len(skipped) == MAX_SKIPPED + 1
    assert skipped["…"] == f"and {197 - MAX_SKIPPED} more"


@pytest.mark.parametrize(("there", "looked_at"), [(48, 48), (49, 48), (100, 48)])
def test_a_million_entries_are_too_many(
    there: int, looked_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look ends at MAX_ENTRIES, also within one folder; what was seen until then comes, and one fewer is whole."""
    monkeypatch.setattr(output, "MAX_ENTRIES", 50)
    (tmp_path / "a").touch()
    (tmp_path / "z").mkdir()
    for n in range(there):
        (tmp_path / "z" / str(n)).touch()
    sent, skipped = collected(tmp_path, max_files=100)
    assert "a" in sent
    assert len(sent) == 1 + looked_at
    assert skipped == ({} if there == looked_at else {"z": "more than 50 entries; the rest was not looked at"})


def test_that_not_all_was_looked_at_is_said_whatever_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attack: of 20,001 files in one folder none came out. The files that fit come, and it is named."""
    monkeypatch.setattr(output, "MAX_ENTRIES", 200)
    for n in range(201):
        (tmp_path / f"{n:03}").touch()
    sent, skipped = collected(tmp_path, max_files=8)
    assert len(sent) == 8
    assert skipped["."] == "more than 200 entries; the rest was not looked at"
    assert skipped["…"] == f"and {200 - 8 - MAX_SKIPPED} more"


def test_a_chain_of_folders_is_cut(tmp_path: Path) -> None:
    """At MAX_DEPTH; what lies above it comes."""
    folder = tmp_path
    for _ in range(MAX_DEPTH + 5):
        folder /= "d"
        folder.mkdir()
        (folder / "f").touch()
    sent, skipped = collected(tmp_path, max_files=100)
    assert len(sent) == MAX_DEPTH
    assert list(skipped.values()) == [f"more than {MAX_DEPTH} directories deep"]


@pytest.mark.parametrize("name", [b"\xff", b"a\xc3", b"\xed\xa0\x80"])
def test_a_name_that_is_no_text_is_skipped_in_printable_form(tmp_path: Path, name: bytes) -> None:
    """And cannot break the outcome's message."""
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).touch()
    sent, skipped = collected(tmp_path)
    assert sent == {}
    ((shown, reason),) = skipped.items()
    assert reason == "its name is not UTF-8"
    assert shown.isascii()


@pytest.mark.parametrize("room", [0, 1])
def test_what_was_last_written_into_a_full_place_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The last that took room, and empty ones after it; the control has a byte left."""
    for second, (name, content) in enumerate([("whole", b"x"), ("cut", b"x"), ("after", b"")]):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (second, second))
    found = list(os.statvfs(tmp_path))
    found[4] = room
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(found))
    host = Host()
    try:
        collect(host.loop, str(tmp_path), max_files=9, max_bytes=9)
    finally:
        host.close()
    assert set(host.files) == {"whole", "cut", "after"}
    assert host.cut == (set() if room else {"cut", "after"})


@pytest.mark.parametrize("name", ["\n", "\x1b[2J", "a b", "\u202e", "-rf", "..."])
def test_odd_names_are_the_hosts_to_judge(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert collected(tmp_path) == ({name: b""}, {})


def test_a_file_the_host_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    """Also in the middle of one larger than a window, when no credit comes any more."""
    (tmp_path / "a-large").write_bytes(bytes(5 * wire.WINDOW))
    (tmp_path / "b").write_text("x")
    sent, skipped = collected(tmp_path, refuse=frozenset({"a-large"}))
    assert (sent, skipped) == ({"b": b"x"}, {})


def test_a_host_that_is_gone_ends_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(5 * wire.WINDOW))
    host = Host()
    full = os.open("/dev/full", os.O_WRONLY)
    host.loop._out = full
    try:
        with pytest.raises(EOFError):
            collect(host.loop, str(tmp_path), max_files=1, max_bytes=1 << 30)
    finally:
        os.close(full)
        host.close()


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((), 100),
        ((60,), 100),
        ((40, 50), 60),
        ((20, 20, 20, 20), 40),
        ((100,), 100),
        ((101,), 100),
        ((60, 60, 60), 33),
        ((10, 60, 60), 45),
    ],
)
def test_pictures_that_fit_together_are_left_as_they_are(sizes: tuple[int, ...], most: int) -> None:
    """Where they do not, the small ones leave the others what they do not need."""
    assert share(sizes, 100) == most
    if sum(sizes) <= 100:
        assert all(size <= most for size in sizes)
