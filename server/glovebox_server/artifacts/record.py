"""The record of one artifact, its URI, and the exceptions for one that is not available. Pure: no I/O.

Must never be imported here: the store, or anything of a transport.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, ClassVar, Final

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError

_ID_BYTES: Final = 16
"""128 random bits: a URI cannot be guessed, so it reveals nothing."""
_ID: Final = re.compile(r"[0-9a-f]{32}")
_SCHEME: Final = "artifact://"


class ArtifactStoreError(DiagnosedError):
    """A failure of the artifact store; nothing half-done is left. The operator can act, the model cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One collected file. Read from disk only through ``decode``, which checks every field."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    uri: Annotated[str, Field(pattern=r"^artifact://[0-9a-f]{32}$")]
    """A capability that works only for its owner."""
    owner: str
    call_id: str
    name: str
    """Accepted name relative to ``/output``; a label, never a path on the host."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]
    media_type: str
    """Detected; active documents are ``text/plain``."""
    created: AwareDatetime
    expires: AwareDatetime
    """From then on it is unknown to all callers."""
    client: str | None = None
    run: str | None = None
    workflow: str | None = None
    tool: str | None = None
    risks: tuple[str, ...]
    """Why it must not be opened or promoted unseen, one sentence each."""

    @property
    def id(self) -> str:
        """Return the random part of the URI, which names its folder in the store."""
        return self.uri.removeprefix(_SCHEME)


_ADAPTER: Final = TypeAdapter(Artifact)


def encode(artifact: Artifact) -> bytes:
    """Return the record as one JSON object."""
    return _ADAPTER.dump_json(artifact, exclude_none=True)


def decode(data: bytes) -> Artifact:
    """Return the record that ``encode`` wrote; raise ``ValueError`` if torn, edited, or of another version."""
    return _ADAPTER.validate_json(data, strict=True)


def new_id() -> str:
    """Return the random part of a new URI, which cannot be guessed."""
    return secrets.token_hex(_ID_BYTES)


def uri_of(identifier: str) -> str:
    """Return the URI with this random part."""
    return _SCHEME + identifier


def id_of(uri: str) -> str | None:
    """Return the random part of a well-formed URI, else None; ``uri`` is unchecked."""
    identifier = uri.removeprefix(_SCHEME)
    return identifier if uri.startswith(_SCHEME) and is_id(identifier) else None


def is_id(text: str) -> bool:
    """Return whether this is the random part of a URI: only such strings become part of a path."""
    return _ID.fullmatch(text) is not None


def unknown() -> RefusedError:
    """Return the one refusal for every unavailable artifact, whatever the reason: F7, no oracle."""
    return RefusedError(
        "artifacts.unknown",
        "There is no artifact of yours at this address: it never existed, has expired, or belongs to someone else.",
        "Use an artifact:// address from a result of your own calls, or run the call again.",
    )


def expired(artifact: Artifact, now: datetime) -> bool:
    """Return whether the artifact has expired."""
    return artifact.expires <= now
