"""Where a server keeps things and what it serves: from the command line, else the environment, else the default.

No setting here can widen a profile; profiles are the only place where a tool is allowed anything.
"""

import difflib
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import platformdirs
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

_NO_SETTINGS = frozenset(
    f"GLOVEBOX_{name}"
    for name in ("AUTHORIZATION", "CACHE", "CANARY", "CODE", "CONFORMANCE_CANARY", "CONTROL", "DOCKERD_LOG",
                 "DOCKERD_ROOT", "MUST_RUN", "NODE_DIR", "WAITING_CODE")
)  # fmt: skip
"""Variables of the project's own that are no settings: of tests, scripts and client configurations."""


class NoDefaultError(Exception):
    """A directory was not named, and there is none to take instead; the message names the option."""


def _own(name: str, place: Callable[[str], Path]) -> Callable[[], Path]:
    """A directory of the user's, as the XDG directories and the home have it."""

    def find() -> Path:
        found = place("glovebox")
        if not found.is_absolute():  # what is run from another directory would look elsewhere
            option = f"--{name.lower()}-dir, GLOVEBOX_{name}_DIR"
            raise NoDefaultError(f"{option}: the default, {found}, is no whole path. Name one, or set HOME to one.")
        return found

    return find


_own_state = _own("STATE", platformdirs.user_state_path)


class Settings(BaseSettings):
    """Every setting. Environment variables have the prefix ``GLOVEBOX_``."""

    model_config = SettingsConfigDict(env_prefix="GLOVEBOX_", extra="ignore", frozen=True)

    workspace: Path | None = None
    """Directory that tools may read, read-only. What is served where none was named: ``workspace.find``."""
    profiles_dir: Path = Field(
        default_factory=_own("PROFILES", lambda name: platformdirs.user_config_path(name) / "profiles")
    )
    """The operator's own profiles; each file replaces the shipped profile of the same tool."""
    policy: Path | None = None
    """Who may call what, how much, and who is asked: `policy.toml` beside the profiles' directory, if it is there."""
    locked: Path | None = None
    """The lock that all in force must agree with, as `glovebox profiles lock` wrote it."""
    require_signed: Path | None = None
    """The public key, in PEM, that must have signed that lock."""
    data_dir: Path = Field(default_factory=_own("DATA", platformdirs.user_data_path))
    """The sandboxes' Python runtime, which `glovebox setup` builds."""
    state_dir: Path = Field(default_factory=_own_state)
    """Audit log, artifacts and the HTTP token. Only its owner may look into it."""
    artifact_hours: float = Field(default=24.0, gt=0, le=24 * 30)
    """How long artifacts can be read, in hours."""
    artifact_total_mib: int = Field(default=1024, ge=16)
    """Size of all artifacts together, in MiB."""
    audit_keep_days: float | None = Field(default=None, gt=0)
    """How long sealed segments of the audit log are kept, in days. For ever unless given."""
    audit_keep_mib: int | None = Field(default=None, ge=1)
    """How large the audit log may be, in MiB, before its oldest segments are removed. No limit unless given."""
    audit_anchor: Annotated[str, Field(pattern=r"^(file:/.|exec:\S)")] | None = None
    """Where the end of the audit log's chain is kept: `file:/PATH`, or `exec:COMMAND`, which is given it."""
    audit_anchor_minutes: float = Field(default=5.0, gt=0, le=24 * 60)
    """How often, in minutes."""
    audit_arguments_key: Path | None = None
    """The X25519 public key, in PEM, to which the log seals calls' arguments."""

    @staticmethod
    def own_state_dir() -> Path:
        """Return the user's own state directory.

        Raises:
            NoDefaultError: there is no home to have it in.
        """
        return _own_state()

    @property
    def environments_dir(self) -> Path:
        """The operator's own environments: beside the profiles."""
        return self.profiles_dir.absolute().parent / "environments"

    @field_validator(
        "workspace",
        "profiles_dir",
        "policy",
        "data_dir",
        "state_dir",
        "locked",
        "require_signed",
        "audit_arguments_key",
        mode="before",
    )
    @classmethod
    def _named(cls, given: object) -> object:
        """Refuse the empty name, which would be that of the current directory: a variable in a script was not set."""
        if given == "":
            raise PydanticCustomError("path_empty", "it is empty: name a path, or unset it")
        return given

    @field_validator("audit_anchor")
    @classmethod
    def _words(cls, given: str | None) -> str | None:
        """Refuse a command that cannot be split into words: it would be found when the first anchor is kept."""
        if given is not None and given.startswith("exec:"):
            try:
                shlex.split(given)
            except ValueError as problem:
                why = {"problem": str(problem)}
                raise PydanticCustomError("command", "its command cannot be split into words: {problem}", why) from None
        return given


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """What is wrong with each variable that looks like a setting and is none: whoever set it believes it in force.

    Args:
        environment: names of variables.
    """
    known = {f"GLOVEBOX_{name.upper()}" for name in Settings.model_fields}
    found = sorted(name for name in environment if name.upper().startswith("GLOVEBOX_"))
    # Written otherwise, a name means the same to what reads the environment, and one of two would silently win.
    wrong = [name for name in found if name not in known | _NO_SETTINGS]
    nearest = {name: difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0) for name in wrong}
    return [f"{name} is no setting. The nearest is {''.join(nearest[name])}; or unset it." for name in wrong]
