"""The record of one artifact, its address, and the exceptions for one that cannot be had. Pure: no I/O.

Must never be imported here: the store, or anything of a transport.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, ClassVar, Final

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.errors import RefusedError

_ID_BYTES: Final = 16
"""128 random bits: an address cannot be guessed, so it does not tell that anything exists."""
_ID: Final = re.compile(r"[0-9a-f]{32}")
_SCHEME: Final = "artifact://"


class ArtifactStoreError(DiagnosedError):
    """The artifact store could not do its work; nothing half-done is left. The operator can act, the model cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One collected file. Read back from disk only through ``decode``, which checks every field."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    uri: Annotated[str, Field(pattern=r"^artifact://[0-9a-f]{32}$")]
    """Its address: a capability that still works for its owner alone."""
    owner: str
    """``Principal.id`` of the caller it belongs to."""
    call_id: str
    """The call it came from."""
    name: str
    """Accepted relative name inside ``/output``; a label, never a path on the host."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hex digest of the content."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the content."""
    media_type: str
    """As the content says; active documents are ``text/plain``."""
    created: AwareDatetime
    """When its last byte had arrived."""
    expires: AwareDatetime
    """From then on it is unknown to everyone."""
    client: str | None = None
    """What the caller's client called itself."""
    run: str | None = None
    """Id of the piece of work that the call belonged to."""
    workflow: str | None = None
    """Name that the operator had bound to it."""
    tool: str | None = None
    """Whose program wrote it; None of one that an earlier version kept."""
    risks: tuple[str, ...]
    """Why it must not be opened or promoted unseen, one sentence each; empty when nothing was noticed."""

    @property
    def id(self) -> str:
        """The random part of the address, and the name of its folder in the store."""
        return self.uri.removeprefix(_SCHEME)


_ADAPTER: Final = TypeAdapter(Artifact)


def encode(artifact: Artifact) -> bytes:
    """Return the record as one JSON object."""
    return _ADAPTER.dump_json(artifact, exclude_none=True)


def decode(data: bytes) -> Artifact:
    """Return the record that ``encode`` wrote.

    Raises:
        ValueError: The bytes are not such a record: torn, edited, or from another version.
    """
    return _ADAPTER.validate_json(data, strict=True)


def new_id() -> str:
    """Return the random part of a fresh address that nobody can guess."""
    return secrets.token_hex(_ID_BYTES)


def uri_of(identifier: str) -> str:
    """Return the address with this random part."""
    return _SCHEME + identifier


def id_of(uri: str) -> str | None:
    """Return the random part of a well-formed address, else None.

    Args:
        uri: Anything a caller sent.
    """
    identifier = uri.removeprefix(_SCHEME)
    return identifier if uri.startswith(_SCHEME) and is_id(identifier) else None


def is_id(text: str) -> bool:
    """Tell whether this is the random part of an address: the only strings that ever become part of a path."""
    return _ID.fullmatch(text) is not None


def unknown() -> RefusedError:
    """Return the one refusal for every artifact the caller cannot have, whatever the reason: F7, no oracle."""
    return RefusedError(
        "artifacts.unknown",
        "There is no artifact of yours at this address: it never existed, has expired, or belongs to someone else.",
        "Use an artifact:// address from a result of your own calls, or run the call again.",
    )


def expired(artifact: Artifact, now: datetime) -> bool:
    """Tell whether the artifact's time is over."""
    return artifact.expires <= now
