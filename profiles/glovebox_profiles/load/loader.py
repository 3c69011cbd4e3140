"""From directories of TOML files to a ``ProfileSet``: every byte checked, every error with file, line, key and hint.

A later directory replaces whole files of an earlier one, by tool name: nothing is inherited or merged. Never import
``server``: the function that decides a call is an argument.
"""

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.egress.rules import EgressRule, meet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.load import reading
from glovebox_profiles.load.reading import RULES, Mistake, dotted, open_directory, raise_mistakes, read_bytes
from glovebox_profiles.model import Effect, Profile

SHIPPED = Path(__file__).parent.parent / "data"
"""The profiles in the package."""
MAX_PROFILES = 256
"""Files in one directory: more is a wrong directory."""

MAX_IGNORED = 1024
"""Other entries in a directory and its folders: more is a wrong directory."""

PROGRAMS = "run_python"
"""The tool that runs programs, which find placeholders in variables."""

_PROFILE = re.compile(r"[^.].*\.toml")
_POLICY = "policy.toml"
_ALIKE = 0.8
"""Least ratio (``difflib``) at which a name may mean a tool's: two letters exchanged, or a hyphen."""
_HARMLESS = re.compile(
    r"readme.*|licen[cs]e|.+\.(?:md|txt)|\.git|\.gitignore|\.gitattributes|\.gitkeep|\.ds_store|schema\.json"
)
"""Lower-case names that no profile has."""

CheckExample = Callable[[Profile, Mapping[str, Any]], tuple[Effect, str]]
"""Decides one call under one profile, purely: the effect and the id of the deciding rule."""


def load(
    directories: Sequence[Path], *, check_example: CheckExample | None, tools: Collection[str] | None = None
) -> ProfileSet:
    """Load every ``TOOL.toml`` of the directories; a file in a later one replaces an earlier one of the same name.

    Args:
        directories: The shipped directory first, then the operator's.
        check_example: Decides the examples. None skips them: only for reading a profile, never for serving.
        tools: The tools on offer. None skips the check for profiles of unknown tools, also only for reading.

    Raises:
        ProfileError: A directory is missing; a file is unsafe, unreadable, wrong, or has an example that is decided
            otherwise; or another file may be meant as a profile and is not in effect.
    """
    files: dict[str, Path] = {}
    for directory in directories:
        files |= {path.stem: path for path in profile_files(directory)}
        if lost := lost_profiles(directory, tools or ()):
            raise lost[0]
    profiles = {tool: read(path, check_example=check_example, tools=tools) for tool, path in files.items()}
    return ProfileSet(profiles, files)


def is_absent(directory: Path) -> bool:
    """Return whether nothing is there: also no dangling link, and nothing unreadable."""
    try:
        directory.stat()
    except FileNotFoundError:
        return not any(each.is_symlink() and not each.exists() for each in (directory, *directory.parents))
    except OSError:
        return False
    return False


def lost_profiles(directory: Path, tools: Collection[str]) -> tuple[ProfileError, ...]:
    """Return an error for each entry that may be meant as a profile, except notes and version control.

    None of them is in effect, and an operator would trust the narrower profile in it. With a tool's name, beside its
    own file, it is a copy. Without tools the result is empty: then profiles are only read.

    Raises:
        ProfileError: The directory, or a folder in it, cannot be listed.
    """
    if not tools:
        return ()
    present = {path.stem for path in profile_files(directory)}
    found = []
    for path in ignored(directory):
        if tool := _meant(path.name, tools):
            what, name, lost = f"the profile of {tool}", tool, tool not in present
        else:
            folder = path.is_dir() and not path.is_symlink()
            what, name, lost = "a profile", "TOOL", not folder and not _HARMLESS.fullmatch(path.name.lower())
        if lost:
            reason = f"is not in effect, and may be meant as {what}"
            found.append(ProfileError(path, None, "", reason, f"Make it {directory / name}.toml, or move it away."))
    return tuple(found)


def ignored(directory: Path) -> tuple[Path, ...]:
    """Return entries of a profile directory and its folders that are never read; git's own is not entered.

    Raises:
        ProfileError: The directory, or a folder in it, cannot be listed, or there is more than MAX_IGNORED.
    """
    found: list[Path] = []
    waiting = [directory]
    for at in waiting:  # which grows
        for name, folder in _entries(at, owned=at == directory).items():
            if at == directory and _PROFILE.fullmatch(name):
                continue
            found.append(at / name)
            if folder and name != ".git":
                waiting.append(at / name)
        if len(found) > MAX_IGNORED:
            reason = f"holds more than {MAX_IGNORED} files that are no profiles"
            raise ProfileError(directory, None, "", reason, "Name another directory.")
    return tuple(found)


def _meant(name: str, tools: Collection[str]) -> str:
    """Return the tool of a misspelt file: ``run_python.toml.bak``, ``.run-python.tml``."""
    base = name.strip(".~#").partition(".")[0].lower()
    close = difflib.get_close_matches(base, tools, n=1, cutoff=_ALIKE)
    return next((tool for tool in tools if base.startswith(tool)), close[0] if close else "")


def profile_files(directory: Path) -> tuple[Path, ...]:
    """Return the ``*.toml`` files of a directory by name.

    Raises:
        ProfileError: The directory cannot be listed, is writable by others, or holds more than MAX_PROFILES.
    """
    names = [name for name in _entries(directory) if _PROFILE.fullmatch(name)]
    if len(names) > MAX_PROFILES:
        reason = f"holds {len(names)} profiles, more than {MAX_PROFILES}"
        raise ProfileError(directory, None, "", reason, "Name another directory.")
    return tuple(directory / name for name in names)


def _entries(directory: Path, *, owned: bool = True) -> dict[str, bool]:
    """Return sorted names in a directory that no other user can have changed, and whether each is a folder."""
    with open_directory(directory, owned=owned, above=directory != SHIPPED) as handle, os.scandir(handle) as entries:
        return dict(sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries))


def read(
    path: Path, *, check_example: CheckExample | None, tools: Collection[str] | None = None, any_name: bool = False
) -> Profile:
    """Read one profile file; its name must be the tool's with ``.toml``, unless ``any_name`` (to compare versions).

    Raises:
        ProfileError: As for ``load``.
    """
    if path.name == _POLICY and not any_name:
        hint = f"Move it to {path.parent.parent / path.name}."
        raise ProfileError(path, None, "", "is a policy among profiles, so it is not in effect", hint)
    return checked(read_bytes(path), path, check_example=check_example, tools=tools, any_name=any_name)


def checked(
    data: bytes,
    path: Path,
    *,
    check_example: CheckExample | None,
    tools: Collection[str] | None = None,
    any_name: bool = False,
) -> Profile:
    """Check the bytes of a profile as ``read`` does a file; errors name ``path``. Raises as ``load``."""
    profile, positions = reading.parse_model(data, path, Profile, "docs/use/profiles.md")
    lines = positions.lines
    if RULES in positions.headed:
        # Truncated, a rule below a header of its own would lose its paths and so match every path.
        fix = 'Write them as allow = [{ host = "docs.python.org" }, ...].'
        raise ProfileError(path, lines[RULES], dotted(RULES), "its rules stand below headers of their own", fix)
    raise_mistakes(_misplaced_keys(profile), path, lines)
    if tools is not None and profile.tool not in tools:
        absent = f'there is no tool "{profile.tool}"'
        raise_mistakes([(("tool",), absent, nearest(profile.tool, sorted(tools)))], path, lines)
    mistakes: list[Mistake] = []
    if profile.tool != path.stem and not any_name:
        fix = f"Name the file {profile.tool}.toml, so that exactly one file answers for one tool."
        mistakes.append((("tool",), f'is "{profile.tool}" in a file named {path.name}', fix))
    if check_example:
        decided = ((example, check_example(profile, example.call)) for example in profile.example)
        mistakes += reading.failing_examples(decided, "profile")
    raise_mistakes(mistakes, path, lines)
    return profile


def parse(data: bytes, path: Path) -> Profile:
    """Parse the bytes of one profile; raise ProfileError, which names ``path``, unless they are valid."""
    return checked(data, path, check_example=None, any_name=True)


def _misplaced_keys(profile: Profile) -> Iterator[Mistake]:
    """Yield a credential that no request can use, or whose host is also reachable by a tunnel."""
    for index, each in enumerate(profile.network.credential):
        place = ("network", "credential", index)
        if each.env is not None and profile.tool != PROGRAMS:
            fix = f"Leave it out: requests of {profile.tool} get the key unasked."
            yield (*place, "env"), f"{profile.tool} runs no program to find it", fix
        tunnel = EgressRule(host=each.host, methods=frozenset({"CONNECT"}))
        if profile.tool == PROGRAMS and meet(profile.network.allow, [tunnel]):
            reason = f"is {each.host}, to which network.allow has a tunnel: nothing is added or looked for there"
            fix = 'Take CONNECT out of that rule; ordinary HTTPS works with network.tls = "inspect".'
            yield (*place, "host"), reason, fix
