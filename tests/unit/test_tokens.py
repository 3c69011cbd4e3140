"""Tokens: made once, read only from files that nobody else can read, compared without telling."""

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from glovebox_server.cli.actions import client_config
from glovebox_server.transport import tokens


def test_the_first_start_makes_one_token_for_its_owner_alone(tmp_path: Path) -> None:
    """0700 and 0600 whatever the umask, long enough, kept over restarts, no draft left."""
    old = os.umask(0)
    try:
        made = tokens.load(tmp_path / "tokens")
    finally:
        os.umask(old)
    assert set(made) == {"default"}
    assert len(made["default"]) >= 43
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "tokens" / "default").stat().st_mode) == 0o600
    assert [entry.name for entry in (tmp_path / "tokens").iterdir()] == ["default"]
    assert tokens.load(tmp_path / "tokens") == made


def test_servers_that_start_together_agree(tmp_path: Path) -> None:
    """Of several first starts at once, one makes the token and all read it."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(tokens.load(tmp_path / "t")["default"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def _write(path: Path, content: str, mode: int = 0o600) -> None:
    path.touch(mode=0o600)
    path.write_text(content)
    path.chmod(mode)


GOOD = "a" * 40


def test_a_token_others_can_read_is_refused(tmp_path: Path) -> None:
    """M10: group or world access to a file or to the directory; the same file with 0600 loads (the control)."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", GOOD, 0o640)
    with pytest.raises(tokens.TokensUnusable, match=r"mode 640.*chmod 600"):
        tokens.load(place)
    (place / "ci").chmod(0o600)
    assert tokens.load(place) == {"ci": GOOD}
    place.chmod(0o755)
    with pytest.raises(tokens.TokensUnusable, match=r"mode 755.*chmod 700"):
        tokens.load(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_token_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """M10: a file that another user owns could be changed by them."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", GOOD)
    os.chown(place / "ci", 12345, -1)
    with pytest.raises(tokens.TokensUnusable, match="belongs to user 12345"):
        tokens.load(place)


def test_links_fifos_and_other_things_are_refused(tmp_path: Path) -> None:
    """M10: nothing is followed and nothing is waited for."""
    elsewhere = tmp_path / "elsewhere"
    _write(elsewhere, GOOD)
    makers: list[Callable[[Path], None]] = [
        lambda path: path.symlink_to(elsewhere),
        os.mkfifo,
        lambda path: path.mkdir(mode=0o700),
    ]
    for number, make in enumerate(makers):
        place = tmp_path / f"tokens{number}"
        place.mkdir(mode=0o700)
        make(place / "ci")
        with pytest.raises(tokens.TokensUnusable):
            tokens.load(place)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "tokens0", target_is_directory=True)
    with pytest.raises(tokens.TokensUnusable, match="not a directory"):
        tokens.load(link)


@pytest.mark.parametrize("content", ["", "short", "with space " * 5, "é" * 40, "a" * 129, "a" * 100_000])
def test_what_is_no_token_is_refused(content: str, tmp_path: Path) -> None:
    """A truncated or foreign file is not an empty password."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", content)
    with pytest.raises(tokens.TokensUnusable, match="one token") as raised:
        tokens.load(place)
    assert content[:20] not in str(raised.value) or not content


def test_the_owner_of_a_token_is_found_by_the_whole_token_only() -> None:
    """A part, an extension, another case or bytes that are no text find nobody."""
    known = {"alice": "A" * 40, "bob": "B" * 40}
    assert tokens.owner(known, "A" * 40) == "alice"
    assert tokens.owner(known, "B" * 40) == "bob"
    for presented in ("", "A" * 39, "A" * 41, "a" * 40, "\udcff" * 40, "A" * 40 + "\n"):
        assert tokens.owner(known, presented) is None


def test_client_configuration_is_ready_to_paste(tmp_path: Path) -> None:
    """Each block of JSON parses, holds the token where it must and nowhere else, and names absolute paths."""
    token = tokens.load(tmp_path / tokens.DIRECTORY)["default"]
    text = tokens.client_configuration(tmp_path, transport="http", host="127.0.0.1", port=8321)
    blocks = [json.loads(part[part.index("{") :]) for part in text.split("\n\n") if "{\n" in part]
    assert len(blocks) == 3
    assert "http://127.0.0.1:8321/mcp" in json.dumps(blocks[2])
    assert token in json.dumps(blocks[2])
    assert token not in json.dumps(blocks[1]), "VS Code asks for it"
    assert "http://127.0.0.1:8321/sse" in text
    arguments = ("--workspace", "/home/me")
    local = tokens.client_configuration(tmp_path, transport="stdio", host="", port=0, arguments=arguments)
    assert token not in local
    for part in local.split("\n\n")[1:]:
        (server,) = next(iter(json.loads(part[part.index("{") :]).values())).values()
        assert Path(server["command"]).is_absolute()
        assert server["args"] == ["serve", *arguments]


def test_awkward_paths_survive_the_shell_line() -> None:
    """A space or a quote in a path does not change the command."""
    text = client_config.for_stdio(["/opt/my tools/glovebox", "serve", "--workspace", "/home/o'brien"])
    assert """claude mcp add glovebox -- '/opt/my tools/glovebox' serve --workspace '/home/o'"'"'brien'""" in text
