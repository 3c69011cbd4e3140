"""Paths that mean to lead out of the workspace, or to make a job wait forever (F1, F2, F6)."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.workspace import paths

FOREIGN = "what the host keeps"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with one file, and beside it a directory with a file that is none of the workspace's business."""
    made = make(tmp_path / "w", monkeypatch)
    made.write("inside.txt", "inside\n")
    made.write("sub/deep.txt", "deep\n")
    outside = tmp_path / "w-evil"
    outside.mkdir()
    (outside / "secret.txt").write_text(FOREIGN)
    return made


OUT = [
    "../w-evil/secret.txt",
    "sub/../../w-evil/secret.txt",
    "/etc/passwd",
    "{root}-evil/secret.txt",
    "{root}/../w-evil/secret.txt",
    "..",
    "sub/../..",
    "/",
    "//etc/passwd",
]


@pytest.mark.parametrize("path", OUT)
def test_a_path_that_leaves_the_workspace_is_refused(workspace: Workspace, path: str) -> None:
    """F1: `..`, absolute paths and a sibling whose name begins like the workspace's are outside, and said to be."""
    path = path.format(root=workspace.root)
    assert (workspace.root / path).exists(), "control: without the guard the path leads to something"
    error = workspace.run("read", path=path)["error"]
    assert error["rule"] == "path.outside"
    assert "outside the workspace" in error["reason"]
    assert workspace.rule("list", pattern=path) == "path.outside"
    assert workspace.rule("search", pattern="host", path=path) == "path.outside"


@pytest.mark.parametrize(
    "path", ["INSIDE.TXT", "sub\\deep.txt", "inside.txt\0", "inside.txt/x", "sub/deep.txt/../x", "\ud800"]
)
def test_a_spelling_that_is_not_the_files_name_is_missing(workspace: Workspace, path: str) -> None:
    """F1: other case, backslashes, NUL, a file used as a folder and lone surrogates find nothing."""
    assert workspace.rule("read", path=path) == "path.missing"


def test_another_unicode_form_of_a_name_is_another_name(workspace: Workspace) -> None:
    """F1: NFC and NFD of one word are two files; the control is the form that was written."""
    workspace.write("caf\u00e9", "nfc\n")
    assert workspace.rule("read", path="cafe\u0301") == "path.missing"
    assert workspace.run("read", path="caf\u00e9")["text"] == "nfc\n"


def _leaf(workspace: Workspace) -> str:
    (workspace.root / "leaf").symlink_to("../w-evil/secret.txt")
    return "leaf"


def _absolute(workspace: Workspace) -> str:
    (workspace.root / "absolute").symlink_to(workspace.root.parent / "w-evil" / "secret.txt")
    return "absolute"


def _ancestor(workspace: Workspace) -> str:
    (workspace.root / "ancestor").symlink_to("../w-evil")
    return "ancestor/secret.txt"


def _chain(workspace: Workspace) -> str:
    (workspace.root / "sub" / "one").symlink_to("../two")
    (workspace.root / "two").symlink_to("sub/../../w-evil")
    return "sub/one/secret.txt"


def _process_root(workspace: Workspace) -> str:
    (workspace.root / "root").symlink_to("/proc/self/root")
    return f"root{workspace.root.parent}/w-evil/secret.txt"


def _through_link_and_back(workspace: Workspace) -> str:
    (workspace.root / "away").symlink_to("../w-evil")
    return "away/../w-evil/secret.txt"


@pytest.mark.parametrize("arrange", [_leaf, _absolute, _ancestor, _chain, _process_root, _through_link_and_back])
def test_a_symlink_that_leaves_the_workspace_is_refused(
    workspace: Workspace, arrange: Callable[[Workspace], str]
) -> None:
    """F2: leaf, ancestor, chain, absolute and /proc/self/root. The control opens the same path without the guard."""
    path = arrange(workspace)
    assert (workspace.root / path).read_text() == FOREIGN
    assert workspace.rule("read", path=path) == "path.outside"
    assert workspace.rule("search", pattern="host", path=path) == "path.outside"
    assert workspace.rule("list", pattern=path) == "path.outside"


def test_a_symlink_inside_the_workspace_is_followed(workspace: Workspace) -> None:
    """F2, control: relative and absolute links that stay inside work, also through `..`."""
    (workspace.root / "sub" / "up").symlink_to("../inside.txt")
    (workspace.root / "whole").symlink_to(workspace.root / "sub")
    assert workspace.run("read", path="sub/up")["text"] == "inside\n"
    assert workspace.run("read", path="whole/up")["text"] == "inside\n"
    assert workspace.run("read", path="whole/../inside.txt")["text"] == "inside\n"
    assert workspace.run("read", path=f"{workspace.root}/inside.txt")["text"] == "inside\n"


def test_dangling_and_circular_links_are_named_as_such(workspace: Workspace) -> None:
    """F2: a dangling link is missing, a circle of links is unreadable; thousands of links do not exhaust the stack."""
    (workspace.root / "dangling").symlink_to("nowhere")
    (workspace.root / "circle").symlink_to("circle")
    for number in range(1500):
        (workspace.root / f"l{number}").symlink_to(f"l{number + 1}")
    assert workspace.rule("read", path="dangling") == "path.missing"
    assert workspace.rule("read", path="circle") == "path.unreadable"
    assert workspace.rule("read", path="l0") == "path.unreadable"


def test_a_folder_swapped_for_a_link_while_it_is_walked_leads_nowhere(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: between looking at a folder and entering it, it becomes a link to the outside; openat does not follow it."""
    enter = paths._enter
    swapped: list[str] = []

    def swap_then_enter(held: list[int], name: str) -> None:
        if not swapped:
            swapped.append(name)
            (workspace.root / "sub").rename(workspace.root / "was")
            (workspace.root / "sub").symlink_to("../w-evil")
        enter(held, name)

    monkeypatch.setattr(paths, "_enter", swap_then_enter)
    assert workspace.rule("read", path="sub/secret.txt") == "path.missing"
    assert swapped == ["sub"]
    assert (workspace.root / "sub" / "secret.txt").read_text() == FOREIGN, "control: the swap did lead outside"


def test_a_file_swapped_for_a_link_while_it_is_opened_is_not_followed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: between the check and open(2) the file becomes a link to the outside."""
    check = paths._require_regular
    swapped: list[str] = []

    def swap_after_check(path: str, info: os.stat_result) -> None:
        check(path, info)
        if not swapped:
            swapped.append(path)
            (workspace.root / "inside.txt").unlink()
            (workspace.root / "inside.txt").symlink_to("../w-evil/secret.txt")

    monkeypatch.setattr(paths, "_require_regular", swap_after_check)
    assert workspace.rule("read", path="inside.txt") == "path.unreadable"
    assert (workspace.root / "inside.txt").read_text() == FOREIGN, "control: the swap did lead outside"


def test_what_is_not_a_file_is_neither_opened_nor_waited_for(workspace: Workspace) -> None:
    """F6: a FIFO without a writer, a socket and a device; the control shows that the FIFO has no writer."""
    os.mkfifo(workspace.root / "fifo")
    with pytest.raises(OSError, match="No such device or address"):
        os.open(workspace.root / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    server = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(workspace.root)  # the address of a socket has at most 107 bytes
    try:
        server.bind("socket")
    finally:
        os.chdir(here)
        server.close()
    assert workspace.rule("read", path="fifo") == "path.special"
    assert workspace.rule("read", path="socket") == "path.special"
    assert workspace.rule("read", path="sub") == "path.directory"
    assert workspace.rule("read", path="") == "path.directory"
    listed = {entry["path"]: entry["type"] for entry in workspace.run("list")["entries"]}
    assert (listed["fifo"], listed["socket"]) == ("special", "special")
    assert workspace.run("search", pattern="deep")["searched"] == 2


def test_nothing_below_a_link_is_listed_or_searched(workspace: Workspace) -> None:
    """F2: links are entries, not folders to walk; the control is os.walk with followlinks."""
    (workspace.root / "away").symlink_to("../w-evil")
    (workspace.root / "file").symlink_to("../w-evil/secret.txt")
    followed = [name for _, _, names in os.walk(workspace.root, followlinks=True) for name in names]
    assert "secret.txt" in followed
    listed = workspace.run("list")["entries"]
    assert [entry["path"] for entry in listed if entry["type"] == "symlink"] == ["away", "file"]
    assert not any("secret" in entry["path"] for entry in listed)
    assert workspace.run("search", pattern="host")["matches"] == []


def test_descriptors_are_closed_whatever_a_path_meets(workspace: Workspace) -> None:
    """A call that fails leaves no descriptor open, so none is there for what runs next."""
    (workspace.root / "circle").symlink_to("circle")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in ("../x", "circle", "nowhere/at/all", "sub", "inside.txt", "sub/deep.txt", "\0", "sub/../inside.txt"):
        workspace.run("read", path=path)
    workspace.run("list")
    workspace.run("search", pattern="x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
