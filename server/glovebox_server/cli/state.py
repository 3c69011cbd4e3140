"""Locates the state directory of a command; as root, becomes its owner before opening anything in it.

Root opens nothing of a directory that belongs to another user: it reads the owner (stat(2)) and takes that user's
rights. The code that then opens the directory checks it as for every user, so one that was exchanged meanwhile is
refused.
"""

import importlib
import json
import os
import pwd
import shlex
import stat
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import click

from glovebox_audit import writers
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError
from glovebox_sandboxes.host import staging
from glovebox_sandboxes.plural import counted
from glovebox_server.failures import own_command
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings, own_state_dir

MACHINE_FILE = Path("/etc/glovebox/glovebox.toml")
"""Names the state directory of the machine's service. No variable or option moves it: root obeys its content."""
_MAX_BYTES: Final = 4096
_ROOT = 0
T = TypeVar("T")
OPERATOR: Final = f"local:{os.getuid()}"
"""The user of the command, for the record: still root after taking the rights of a directory's owner."""


def _refuse_file(reason: str, fix: str) -> DiagnosedError:
    """Return the failure to read the machine's file: no command knows its directory then."""
    return DiagnosedError(f"Reading {MACHINE_FILE}", reason, fix)


def read_machine_file() -> Path | None:
    """Return the state directory that the machine's settings file names; None without such a file.

    Raises DiagnosedError if others than root could write the file or its directory, or it does not name a directory.
    """
    try:
        table = tomllib.loads(_read_roots_file().decode())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _refuse_file(f"{problem.strerror}", "Make it a file that all may read, or remove it.") from problem
    except ValueError as problem:  # UnicodeDecodeError and TOMLDecodeError are
        raise _refuse_file(f"it is not TOML: {problem}", "Correct it.") from problem
    named = table.get("state_dir")
    if set(table) != {"state_dir"} or not isinstance(named, str) or not Path(named).is_absolute():
        raise _refuse_file("it has to hold one line and no more", 'Write `state_dir = "/var/lib/glovebox/state"`.')
    return Path(named)


def _read_roots_file() -> bytes:
    # Non-blocking: a FIFO in its place blocks no command.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as stack:
        folder = os.open(MACHINE_FILE.parent, flags | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        file = os.open(MACHINE_FILE.name, flags, dir_fd=folder)
        stack.callback(os.close, file)
        for path, descriptor in ((MACHINE_FILE.parent, folder), (MACHINE_FILE, file)):
            found = os.fstat(descriptor)
            # The group's bits are the upper bound of an access list: acl(5).
            if found.st_uid != _ROOT or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                fix = f"As root, look at what it says, then run `chown root: {path} && chmod go-w {path}`."
                raise _refuse_file(f"others than root can write {path}", fix)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _refuse_file("it is no regular file", "Make it one, or remove it.")
        return os.read(file, _MAX_BYTES)


def find_directories(settings: Settings, *, named: bool) -> list[Path]:
    """Return the state directories this command can be about, the intended one first.

    ``named``: that one was given on the command line, so there is no other.
    """
    places = [settings.state_dir]
    if not named:
        places += [place] if (place := read_machine_file()) is not None else []
        with suppress(DiagnosedError):
            places.append(own_state_dir())
    unique: dict[object, Path] = {}
    for place in places:
        key: object = place
        try:
            status = place.stat()
            key = status.st_dev, status.st_ino
        except PermissionError:
            pass
        except OSError:
            if place != settings.state_dir:  # the command may still make it
                continue
        unique.setdefault(key, place)
    return list(unique.values())


def locate(settings: Settings, *, guesses: bool = True) -> Settings:
    """Return the settings with the machine's state directory, unless one was named.

    Raises MisnamedError, unless ``guesses``, if none was named and several have live servers.
    """
    if "state_dir" in settings.model_fields_set:
        return settings
    if (place := read_machine_file()) is not None:
        settings = settings.model_copy(update={"state_dir": place})
    busy, places = [], [] if guesses else find_directories(settings, named=False)
    for place in places if len(places) > 1 else ():
        with suppress(DiagnosedError):
            if servers := run_as_owner(place, partial(live_servers, place)):
                busy.append(describe(place, servers))
    if len(busy) > 1:
        what = f"There are live servers in {' and in '.join(busy)}"
        raise MisnamedError(what, "none of these directories was named", "Name one with --state-dir.")
    return settings


def live_servers(directory: Path) -> list[str]:
    """Return the ids of the servers that have the log of a state directory open."""
    return writers.live(directory / "audit")


def describe(directory: Path | str, servers: list[str]) -> str:
    """Return a directory and its live servers, for a person."""
    if not servers:
        return f"{directory} (no live server)"
    numbers = ", ".join(server.removeprefix("g").partition("-")[0] for server in servers)
    return f"{directory} ({counted(len(servers), 'live server')}: process {numbers})"


def run_as_owner(directory: Path, act: Callable[[], T]) -> T:
    """Do something with the rights of a directory's owner; as root, in a process that gives up its own.

    The result of ``act`` is passed as JSON. Raises SecretFileError if this user may not read the directory;
    DiagnosedError if ``act`` raised it, there.
    """
    owner = _other_owner(directory)
    if owner is None:
        return act()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said: dict[str, object] = {}
        try:
            _become(owner, directory)
            said = {"result": act()}
        except DiagnosedError as problem:
            said = {"problem": [problem.what, problem.reason, problem.fix]}
        except OSError as problem:
            said = {"problem": [f"Using {directory} as user {owner.pw_uid}", str(problem), "Run it as that user."]}
        finally:
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read() or b"{}")
    os.waitpid(child, 0)
    if "result" not in answer:
        ended = (f"Using {directory} as user {owner.pw_uid}", "the process for it ended", "Run it as that user.")
        raise DiagnosedError(*answer.get("problem", ended))
    return cast("T", answer["result"])


def become_owner(directory: Path) -> bool:
    """Take the rights of a directory's owner for good, if root, with that user's home.

    Returns whether this changed anything. Raises SecretFileError if this user may not read it.
    """
    owner = _other_owner(directory)
    if owner is not None:
        _become(owner, directory)
    return owner is not None


def _become(owner: pwd.struct_passwd, directory: Path) -> None:
    # An installation below a folder of root's alone cannot be read afterwards: what a failure needs is imported first.
    importlib.import_module("glovebox_server.cli.failures")
    click.wrap_text("")
    uid, gid = owner.pw_uid, owner.pw_gid
    staging.uncover(directory)
    if owner.pw_name:
        os.initgroups(owner.pw_name, gid)
    else:
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.environ["HOME"] = owner.pw_dir


def _other_owner(directory: Path) -> pwd.struct_passwd | None:
    """Return the user to become; None if this process has the rights it needs, or can have no others."""
    try:
        status = _owner_of(directory)
    except PermissionError:
        raise _no_access(directory) from None
    if os.geteuid() != _ROOT:
        if os.path.lexists(directory) and not os.access(directory, os.R_OK | os.X_OK):
            raise _no_access(directory)
        return None
    if status.st_uid == _ROOT:
        return None
    try:
        return pwd.getpwuid(status.st_uid)
    except KeyError:  # in no registry, as one of systemd's ``DynamicUser=`` whose service is down
        return pwd.struct_passwd(("", "", status.st_uid, status.st_gid, "", "/", ""))


def _owner_of(directory: Path) -> os.stat_result:
    """Return the status of the directory, or of the nearest one above, whose owner will own what is made below."""
    for place in (directory, *directory.absolute().parents):
        with suppress(FileNotFoundError):
            return place.stat()
    return Path("/").stat()


def _no_access(directory: Path) -> SecretFileError:
    """Return the failure, with this command as root types it; sudo passes no variable on, so the directory is named."""
    words = [*own_command(), *sys.argv[1:]]
    if not any(word.partition("=")[0] == "--state-dir" for word in words):
        words += ["--state-dir", str(directory)]
    fix = f"Run `{shlex.join(['sudo', *words])}`, or name a directory of yours with --state-dir."
    return SecretFileError("state directory", directory, "it cannot be opened: Permission denied", fix)
