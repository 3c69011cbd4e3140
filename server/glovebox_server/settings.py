"""Settings of a server: from the command line, else the environment, else the default.

No setting here can widen a profile; only profiles allow anything to a tool.
"""

import difflib
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from glovebox_sandboxes.contract.errors import DiagnosedError

_NO_SETTINGS = frozenset(
    f"GLOVEBOX_{name}"
    for name in ("AUTHORIZATION", "CACHE", "CANARY", "CONFORMANCE_CANARY", "CONTROL", "DOCKERD_LOG",
                 "DOCKERD_ROOT", "MUST_RUN", "NODE_DIR")
)  # fmt: skip
"""Variables of tests, scripts and client configurations that are no settings."""

_WEBHOOK = r"(https://[A-Za-z0-9.:\[\]-]+|http://(127(\.[0-9]{1,3}){3}|localhost|\[::1\])(:[0-9]{1,5})?)([/?][!-~]*)?"
"""An address that notifications may go to: by TLS, or on this machine."""


def _own(name: str, place: Callable[[str], Path]) -> Callable[[], Path]:
    """Return a factory of a directory of the user's, by the XDG directories and the home."""

    def find() -> Path:
        found = place("glovebox")
        if not found.is_absolute():  # what runs in another directory would resolve it elsewhere
            option = f"--{name.lower()}-dir, GLOVEBOX_{name}_DIR"
            raise DiagnosedError(option, f"the default, {found}, is no whole path", "Name one, or set HOME to one.")
        return found

    return find


own_state_dir = _own("STATE", platformdirs.user_state_path)
"""Returns the user's own state directory. Raises DiagnosedError if there is no home directory."""


class Settings(BaseModel, frozen=True):
    """Every setting. Environment variables have the prefix ``GLOVEBOX_``."""

    workspace: Path | None = None
    """Directory that tools may read, read-only. ``workspace.find`` has the default."""
    profiles_dir: Path = Field(
        default_factory=_own("PROFILES", lambda name: platformdirs.user_config_path(name) / "profiles")
    )
    """The operator's own profiles; each file replaces the shipped profile of the same tool."""
    policy: Path | None = None
    """Rights, budgets and approvers of callers: `policy.toml` beside the profiles' directory, if it exists."""
    locked: Path | None = None
    """The lock that everything in effect must agree with, as `glovebox profiles lock` wrote it."""
    require_signed: Path | None = None
    """The public key, in PEM, that must have signed that lock."""
    data_dir: Path = Field(default_factory=_own("DATA", platformdirs.user_data_path))
    """The sandboxes' Python runtime, which `glovebox setup` builds."""
    state_dir: Path = Field(default_factory=own_state_dir)
    """Audit log, artifacts and the HTTP token. Readable by its owner only."""
    artifact_hours: float = Field(default=24.0, gt=0, le=24 * 30)
    """Lifetime of artifacts, in hours."""
    artifact_total_mib: int = Field(default=1024, ge=16)
    """Size of all artifacts together, in MiB."""
    audit_keep_days: float | None = Field(default=None, gt=0)
    """Lifetime of sealed segments of the audit log, in days. Unlimited by default."""
    audit_keep_mib: int | None = Field(default=None, ge=1)
    """Size of the audit log, in MiB, above which its oldest segments are removed. Unlimited by default."""
    audit_anchor: Annotated[str, Field(pattern=r"^(file:/.|exec:\S)")] | None = None
    """Place of the audit log's anchors, heads of its chain: `file:/PATH`, or `exec:COMMAND`, which reads them."""
    audit_anchor_minutes: float = Field(default=5.0, gt=0, le=24 * 60)
    """Interval between anchors, in minutes."""
    audit_arguments_key: Path | None = None
    """The X25519 public key, in PEM, to which the log seals calls' arguments."""
    notify: Annotated[str, Field(pattern=rf"^({_WEBHOOK}|exec:\S.*)$")] | None = None
    """A webhook's address, or `exec:COMMAND`, which reads notifications."""
    console_url: str = Field(default="http://127.0.0.1:8322", pattern=r"^https?://[^\s?#]+$")
    """Address of the console, to which notifications link."""

    @property
    def environments_dir(self) -> Path:
        """Return the directory of the operator's own environments, beside the profiles."""
        return self.profiles_dir.absolute().parent / "environments"

    @model_validator(mode="before")
    @classmethod
    def _with_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        names = {name: f"GLOVEBOX_{name.upper()}" for name in cls.model_fields}
        return {name: os.environ[each] for name, each in names.items() if each in os.environ} | given

    @field_validator("*", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        """Refuse an empty value: a variable in a script was not set, and an empty path is the current directory."""
        if given == "":
            raise PydanticCustomError("empty", "it is empty: name a value, or unset it")
        return given

    @field_validator("audit_anchor", "notify")
    @classmethod
    def _words(cls, given: str | None) -> str | None:
        """Refuse a command that cannot be split into words: its first use would fail otherwise."""
        if given is not None and given.startswith("exec:"):
            try:
                shlex.split(given)
            except ValueError as problem:
                why = {"problem": str(problem)}
                raise PydanticCustomError("command", "its command cannot be split into words: {problem}", why) from None
        return given


def exports(signal: Literal["TRACES", "METRICS"]) -> bool:
    """Return whether the standard ``OTEL_*`` variables ask for this signal over OTLP: by an endpoint, or by name."""
    said, chosen = os.environ.get, os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    if said("OTEL_SDK_DISABLED", "").lower() == "true" or chosen not in {"", "otlp"}:
        return False
    return bool(chosen or said("OTEL_EXPORTER_OTLP_ENDPOINT") or said(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return what is wrong with each name of a variable that looks like a setting and is none."""
    known = {f"GLOVEBOX_{name.upper()}" for name in Settings.model_fields}
    found = sorted(name for name in environment if name.upper().startswith("GLOVEBOX_"))
    # A name in another case means the same to pydantic, and one of two would silently win.
    wrong = [name for name in found if name not in known | _NO_SETTINGS]
    nearest = {name: difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0) for name in wrong}
    return [f"{name} is no setting. The nearest is {''.join(nearest[name])}; or unset it." for name in wrong]
