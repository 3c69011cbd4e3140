"""Shared by commands about profiles, locks and policies: one profile, its TOML, a change, an error."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from glovebox_audit.printable import printable
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import KeyChange
from glovebox_server.cli.options import emit, out
from glovebox_server.exits import FAILED, OK

_STYLES = {"widening": "bold red", "narrowing": "green", "neutral": "dim"}


WIDENING = {True: "Something widens.", False: "Nothing widens."}


def found_for(profiles: ProfileSet, tool: str) -> Profile:
    """Return the profile in effect for a tool. Raises ProfileError if there is none."""
    if tool in profiles:
        return profiles[tool]
    reason = "there is no profile for this tool, so every call of it is refused"
    raise ProfileError(tool, None, "", reason, nearest(tool, profiles))


def described(error: ProfileError) -> dict[str, Any]:
    """Return an error as data."""
    return {
        "path": str(error.path), "line": error.line, "key": error.key, "problem": error.reason, "hint": error.fix
    }  # fmt: skip


def say_change(change: KeyChange) -> None:
    """Print one change: its direction, key and sentence."""
    out.print(f"  {change.direction:<9}  {change.key}  {change.sentence}", style=_STYLES[change.direction])


def show_widening(fields: dict[str, Any], changes: Mapping[str, Sequence[KeyChange]]) -> int:
    """Print changes by title, ``fields`` as JSON; return ``FAILED`` if one widens."""
    widened = any(change.direction == "widening" for found in changes.values() for change in found)
    if not emit({"widening": widened, **fields}):
        for title, found in changes.items():
            if title:
                out.print(title, style="bold")
            for change in found:
                say_change(change)
        out.print(WIDENING[widened])
    return FAILED if widened else OK


def to_toml(profile: Profile, comments: Mapping[str, str] | None = None) -> str:
    """Return the effective profile as TOML, one dotted key a line, with comments by key."""
    lines: list[str] = []

    def write(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                write(f"{prefix}{key}.", value)
            else:
                comment = (comments or {}).get(f"{prefix}{key}")
                lines.append(f"{prefix}{key} = {_toml(value)}" + (f" # {printable(comment)}" if comment else ""))

    write("", effective(profile))
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_quoted(key)} = {_toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a TOML string; what a terminal would act on or not show is escaped."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08X}" for each in plain)
