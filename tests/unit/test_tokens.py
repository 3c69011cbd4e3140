"""Tokens: shown once, kept as hashes in files that nobody else can read, compared without telling."""

import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.fixtures.callers import a_token, kept
from tests.fixtures.steps import steps

from glovebox_server import secret_files
from glovebox_server.cli.rules import token as client_config
from glovebox_server.secret_files import SecretFileError
from glovebox_server.transport import tokens
from glovebox_server.transport import tokens as callers_module
from glovebox_server.transport.tokens import Callers


def test_a_made_token_is_kept_as_a_hash_for_its_owner_alone(tmp_path: Path) -> None:
    """0700 and 0600 whatever the umask, no draft left, and nowhere the token; it lets in (the control)."""
    place = tmp_path / "tokens"
    old = os.umask(0)
    try:
        assert tokens.load(place) == {}
        made = tokens.create(place, "ci", role="analyst", workflow="release", lifetime=timedelta(days=30))
    finally:
        os.umask(old)
    assert made is not None
    token, secret = made
    assert len(secret) >= 43
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "ci").stat().st_mode) == 0o600
    assert [entry.name for entry in place.iterdir()] == ["ci"]
    assert secret not in (place / "ci").read_text()
    assert tokens.load(place, {"analyst"}) == {"ci": token}
    assert (token.role, token.workflow) == ("analyst", "release")
    assert token.expires is not None
    grant = Callers({"ci": token}).grant(secret)
    assert grant is not None
    assert (grant.principal, grant.roles, grant.workflow) == ("token:ci", ("analyst",), "release")


def test_of_several_that_make_one_name_one_does(tmp_path: Path) -> None:
    """The others make nothing and change nothing; nor does one who comes later."""
    found: list[tuple[tokens.Token, str] | None] = []
    threads = [threading.Thread(target=lambda: found.append(tokens.create(tmp_path / "t", "ci"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (made,) = [each for each in found if each]
    assert tokens.create(tmp_path / "t", "ci") is None
    assert tokens.load(tmp_path / "t") == {"ci": made[0]}


def test_no_more_tokens_are_made_than_a_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is revoked there is room again (the control)."""
    monkeypatch.setattr(tokens, "MAX_TOKENS", 8)
    for number in range(tokens.MAX_TOKENS):
        assert tokens.create(tmp_path / "t", f"t{number}")
    with pytest.raises(SecretFileError, match="no more may be"):
        tokens.create(tmp_path / "t", "one-more")
    assert tokens.revoke(tmp_path / "t", "t0")
    assert not tokens.revoke(tmp_path / "t", "t0")
    assert tokens.create(tmp_path / "t", "one-more")
    assert len(tokens.load(tmp_path / "t")) == tokens.MAX_TOKENS


def test_more_files_than_tokens_may_be_are_refused_and_change_nothing_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and while a server runs: those in effect stay, and one that is removed goes (the control)."""
    monkeypatch.setattr(tokens, "MAX_TOKENS", 8)
    place = tmp_path / "t"
    for number in range(tokens.MAX_TOKENS):
        assert tokens.create(place, f"t{number}")
    files = tokens.TokenFiles(place)
    before = dict(files.tokens)
    _write(place / "a", GOOD)
    _write(place / "b", GOOD)
    (place / "t0").unlink()
    with pytest.raises(SecretFileError, match="more than 4096 tokens"):
        tokens.load(place)
    assert files.look()
    del before["t0"]
    assert files.tokens == before
    (problem,) = files.problems
    assert "more than 4096 tokens" in str(problem)


def test_a_token_is_read_again_when_its_file_changed_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second of a thousand files would be much. Written in place, open to others, exchanged, without its role."""
    place, read = tmp_path / "t", Mock(side_effect=tokens._read)
    made = [tokens.create(place, name, role="analyst") for name in ("a", "b", "c")]
    monkeypatch.setattr(tokens, "_read", read)
    monkeypatch.setattr(secret_files, "_TICK_NS", 10**18)
    files = tokens.TokenFiles(place, ("analyst",))
    assert not files.look(("analyst",))
    assert not files.look(("analyst",))
    assert read.call_count == 9, "they have just been written, and may change again without showing it"
    monkeypatch.setattr(secret_files, "_TICK_NS", -1)
    for looks, changed, reads, problems, change in (
        (2, False, 3, 0, lambda: None),
        (1, True, 1, 0, lambda: (place / "a").write_text(GOOD)),
        (1, True, 1, 1, lambda: (place / "a").chmod(0o640)),
        (1, True, 1, 0, lambda: (place / "b").replace(place / "a")),
        (2, False, 0, 0, lambda: None),
    ):
        read.reset_mock()
        change()
        assert [files.look(("analyst",)) for _ in range(looks)] == [changed] * looks
        assert (read.call_count, len(files.problems)) == (reads, problems)
    assert {name: token.sha256 for name, token in files.tokens.items()} == {
        "a": made[1] and made[1][0].sha256, "c": made[2] and made[2][0].sha256
    }  # fmt: skip
    assert files.look(())
    assert (read.call_count, len(files.problems)) == (0, 2)


def test_what_is_wrong_with_the_directory_keeps_tokens_in_force_until_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open to others, or not to be read at this moment; repaired, what changed meanwhile counts (the control)."""
    place = tmp_path / "t"
    tokens.create(place, "ci")
    files = tokens.TokenFiles(place)
    before = files.tokens
    place.chmod(0o755)
    assert files.look()
    assert (files.tokens, len(files.problems)) == (before, 1)
    place.chmod(0o700)
    assert files.look()
    assert (files.tokens, files.problems) == (before, ())
    with monkeypatch.context() as broken:
        broken.setattr("glovebox_server.secret_files.opened", _too_many_files)
        _write(place / "more", GOOD)
        assert files.look()
        assert files.tokens == before
        assert "Too many open files" in str(files.problems[0])
    assert files.look()
    assert set(files.tokens) == {"ci", "more"}


def _too_many_files(*_: object) -> Any:
    raise OSError(24, "Too many open files")


def test_a_token_of_an_unknown_role_is_refused_at_the_start(tmp_path: Path) -> None:
    """Each of its calls would be; it loads where the role is there (the control). Without a policy none is."""
    tokens.create(tmp_path / "t", "ci", role="analyst")
    for roles, words in (((), "no policy"), (("other",), "the roles are other")):
        with pytest.raises(SecretFileError, match=f"'analyst'.*{words}"):
            tokens.load(tmp_path / "t", roles)
    assert set(tokens.load(tmp_path / "t", ("analyst",))) == {"ci"}


def test_a_token_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way hears of it, it shares nothing, also between two looks; another goes on (the control)."""
    now = datetime.now(UTC)
    known = {name: tokens.Token(name=name, sha256=tokens.digest_of(name * 40), expires=expires)
             for name, expires in (("a", now + timedelta(seconds=60)), ("b", None), ("c", now))}  # fmt: skip
    callers = Callers(known)
    assert callers.due == now.timestamp() + 60
    assert callers.grant("c" * 40) is None, "it never comes into force"
    first, second = callers.grant("a" * 40), callers.grant("b" * 40)
    assert first is not None
    assert second is not None
    assert callers.replace(known, now.timestamp() + 59) == set()
    assert callers.replace(known, now.timestamp() + 60) == {"token:a"}
    assert (first.expired.is_set(), first.removed.is_set()) == (True, False)
    assert callers.grant("a" * 40) is None
    assert callers.grant("b" * 40) is second
    assert len(callers) == 1
    callers = Callers({"a": known["a"]})
    for seconds, lets_in in ((59, True), (60, False)):
        monkeypatch.setattr(callers_module, "time", SimpleNamespace(time=lambda at=seconds: now.timestamp() + at))
        assert (callers.grant("a" * 40) is not None) == lets_in


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": tokens.digest_of("b" * 40)}, {"role": "reader"}, {"role": None}, {"workflow": "nightly"},
        {"expires": datetime.now(UTC) + timedelta(days=1)},
    ],
    ids=["secret", "another role", "no role", "workflow", "expiry"],
)  # fmt: skip
def test_a_token_that_became_another_ends_what_was_begun_with_it(change: dict[str, Any]) -> None:
    """Whatever it is bound to; read again it is the same (the control)."""
    secret = "b" * 40 if "sha256" in change else "a" * 40
    before = tokens.Token(name="ci", sha256=tokens.digest_of("a" * 40), role="analyst", workflow="release")
    callers = Callers({"ci": before})
    grant = callers.grant("a" * 40)
    assert grant is not None
    assert callers.replace({"ci": before.model_copy()}) == set()
    assert callers.grant("a" * 40) is grant
    after = before.model_copy(update=change)
    assert callers.replace({"ci": after}) == {"token:ci"}
    assert (grant.removed.is_set(), grant.expired.is_set()) == (True, False)
    now = callers.grant(secret)
    assert now is not None
    assert (now.roles, now.workflow) == ((after.role,) if after.role else (), after.workflow)
    assert now.expires == (after.expires.timestamp() if after.expires else None)


def test_when_a_token_was_last_used_is_noted(tmp_path: Path) -> None:
    """To the minute or so; a token that never was says so, and the note is no token."""
    place = tmp_path / "tokens"
    tokens.create(place, "ci")
    assert tokens.last_used(place, "ci") is None
    tokens.note_used(place, {"ci"})
    used = tokens.last_used(place, "ci")
    assert used is not None
    assert abs((datetime.now(UTC) - used).total_seconds()) < 60
    assert set(tokens.load(place)) == {"ci"}
    tokens.revoke(place, "ci")
    tokens.create(place, "ci")
    assert tokens.last_used(place, "ci") is None, "that was another one"


def _write(path: Path, content: str, mode: int = 0o600) -> None:
    path.touch(mode=0o600)
    path.write_text(content)
    path.chmod(mode)


GOOD = kept("a" * 40)


def test_a_token_others_can_read_or_change_is_refused(tmp_path: Path) -> None:
    """M10: group or world access to it or its directory, a link, a FIFO; with 0600 it loads (the control)."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", GOOD, 0o640)
    with pytest.raises(SecretFileError, match=r"mode 640.*chmod 600"):
        tokens.load(place)
    (place / "ci").chmod(0o600)
    assert tokens.load(place) == {"ci": a_token("ci", "a" * 40)}
    place.chmod(0o755)
    with pytest.raises(SecretFileError, match=r"mode 755.*chmod 700"):
        tokens.load(place)
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
        with pytest.raises(SecretFileError):
            tokens.load(place)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "tokens0", target_is_directory=True)
    with pytest.raises(SecretFileError, match="not a directory"):
        tokens.load(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_token_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """M10: a file that another user owns could be changed by them."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", GOOD)
    os.chown(place / "ci", 12345, -1)
    with pytest.raises(SecretFileError, match="belongs to user 12345"):
        tokens.load(place)


HASHED = '{"version":1,"sha256":"' + "0" * 64 + '","made":"2026-11-22T10:00:00Z"}'


@pytest.mark.parametrize(
    "content",
    [
        "", "short", "with space " * 5, "é" * 40, "a" * 129, "a" * 100_000, "{}", HASHED[:-1],
        HASHED.replace("1", "2", 1),
        HASHED.replace('"0', '"g'), HASHED.replace("Z", ""), HASHED[:-1] + ',"version":1}', HASHED[:-1] + ',"other":1}',
        HASHED[:-1] + ',"role":"../x"}', HASHED[:-1] + ',"expires":17}', "[" * 900, HASHED + " " * 2000 + "x",
    ],
)  # fmt: skip
def test_what_is_no_token_is_refused(content: str, tmp_path: Path) -> None:
    """A truncated or foreign file is not an empty password; a whole one loads (the control)."""
    place = tmp_path / "tokens"
    place.mkdir(mode=0o700)
    _write(place / "ci", content)
    with pytest.raises(SecretFileError, match="does not hold what") as raised:
        tokens.load(place)
    assert content[:20] not in str(raised.value) or not content
    _write(place / "ci", HASHED + "\n")
    assert tokens.load(place)["ci"].sha256 == "0" * 64
    _write(place / "ci", "m" * 32 + "\n")  # as another system mounts it
    assert tokens.load(place)["ci"].sha256 == tokens.digest_of("m" * 32)


def test_a_token_is_known_by_the_whole_of_it_only() -> None:
    """A part, an extension, another case or bytes that are no text find nobody; nor does the hash itself."""
    callers = Callers({name: a_token(name, name[0].upper() * 40) for name in ("alice", "bob")})
    for name in ("alice", "bob"):
        grant = callers.grant(name[0].upper() * 40)
        assert grant is not None
        assert grant.principal == f"token:{name}"
    known = tokens.digest_of("A" * 40)
    for presented in ("", "A" * 39, "A" * 41, "a" * 40, "\udcff" * 40, "A" * 40 + "\n", known, known.upper()):
        assert callers.grant(presented) is None


def test_a_token_is_known_in_the_same_steps_whichever_it_is_of_however_many() -> None:
    """Of two and of a thousand, the first and the last; and whatever part of one a wrong token has is no other step."""
    taken, wrong = set(), set()
    for number in (2, 1000):
        callers = Callers({f"t{n}": a_token(f"t{n}", f"{n}".ljust(40, "x")) for n in range(number)})
        for presented in ("0".ljust(40, "x"), f"{number - 1}".ljust(40, "x")):
            assert callers.grant(presented)
            taken.add(steps(partial(callers.grant, presented)))
        wrong |= {steps(partial(callers.grant, presented)) for presented in ("0".ljust(39, "x"), "0", "")}
    assert (len(taken), len(wrong)) == (1, 1)


def test_awkward_paths_survive_the_shell_line() -> None:
    """A space or a quote in a path does not change the command."""
    text = client_config.for_stdio(["/opt/my tools/glovebox", "serve", "--workspace", "/home/o'brien"])
    assert """claude mcp add glovebox -- '/opt/my tools/glovebox' serve --workspace '/home/o'"'"'brien'""" in text
