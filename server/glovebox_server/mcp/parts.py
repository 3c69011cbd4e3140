"""Artifacts as resources: whole, or the part that ``?offset=…&length=…`` names. Only for ``mcp.resources``."""

import base64
import codecs
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import mcp_types as types

from glovebox_server.artifacts.record import Artifact
from glovebox_server.artifacts.store import ArtifactReader
from glovebox_server.errors import RefusedError
from glovebox_server.mcp.delivery import CALL_META_KEY, REDACTED_META_KEY, SHA256_META_KEY, risks_meta

#: Largest part of an artifact in one answer, in bytes: base64 adds a third, and clients reject messages over 1 MiB.
MAX_BYTES = 512 * 1024

#: Key in a part's ``_meta`` of its ``offset`` and ``bytes``, the total size (``of``) and the address of the ``next``.
PART_META_KEY = "dev.glovebox/part"

#: Digits of a number in an address: far more bytes than any store holds.
_DIGITS = 15

Contents = types.TextResourceContents | types.BlobResourceContents

Mask = Callable[[bytes], Awaitable[tuple[bytes, dict[str, int]]]]
"""Replaces each secret by a word, and counts them by kind."""


async def read(reader: ArtifactReader, uri: str, query: str, mask: Mask) -> Contents:
    """Return one part of an artifact.

    Raises:
        RefusedError: rule ``artifacts.part``; the part does not exist.
        ArtifactStoreError: the content is not what was stored, or the disk failed.
    """
    artifact = reader.artifact
    offset, length = _numbers(query)
    if offset >= max(1, artifact.bytes):
        raise _refused(f"offset is {offset}, and the artifact ends at {artifact.bytes}.")
    content = b"".join([piece async for piece in reader.part(offset, length)])
    if _is_text(artifact) and offset + len(content) < artifact.bytes:
        content = _whole_characters(content)
    about: dict[str, Any] = {"offset": offset, "bytes": len(content), "of": artifact.bytes}
    if (end := offset + len(content)) < artifact.bytes:
        about["next"] = f"{artifact.uri}?offset={end}&length={length}"
    content, secrets = await mask(content)
    return contents(uri, artifact, content, secrets, {PART_META_KEY: about, SHA256_META_KEY: artifact.sha256})


def contents(
    uri: str,
    artifact: Artifact,
    content: bytes,
    secrets: Mapping[str, int] = MappingProxyType({}),
    meta: dict[str, Any] | None = None,
) -> Contents:
    """Return bytes of an artifact in MCP's form: as text if they are UTF-8."""
    redacted = {REDACTED_META_KEY: dict(secrets)} if secrets else {}
    known = {
        "uri": uri,
        "mime_type": artifact.media_type,
        "_meta": {CALL_META_KEY: _made_by(artifact), **risks_meta(artifact.risks), **redacted, **(meta or {})},
    }
    if _is_text(artifact):
        try:
            return types.TextResourceContents(text=content.decode(), **known)
        except UnicodeDecodeError:
            pass
    return types.BlobResourceContents(blob=base64.b64encode(content).decode(), **known)


def _made_by(artifact: Artifact) -> dict[str, str]:
    made = {"call_id": artifact.call_id, "principal": artifact.owner, "client": artifact.client, "run": artifact.run,
            "workflow": artifact.workflow}  # fmt: skip
    return {name: value for name, value in made.items() if value is not None}


def _numbers(query: str) -> tuple[int, int]:
    found = {"offset": 0, "length": MAX_BYTES}
    given: set[str] = set()
    for field in query.split("&"):
        name, _, number = field.partition("=")
        if name not in found or name in given or not number.isascii() or not number.isdigit() or len(number) > _DIGITS:
            raise _refused("A part is named by offset and length, each at most once, in decimal digits.")
        given.add(name)
        found[name] = int(number)
    if not 0 < found["length"] <= MAX_BYTES:
        raise _refused(f"length is {found['length']}, and may be from 1 to {MAX_BYTES}.")
    return found["offset"], found["length"]


def _refused(reason: str) -> RefusedError:
    return RefusedError("artifacts.part", reason, f"Begin with ?offset=0&length={MAX_BYTES}; each part names the next.")


def _is_text(artifact: Artifact) -> bool:
    return artifact.media_type.startswith("text/") or artifact.media_type == "application/json"


def _whole_characters(content: bytes) -> bytes:
    """Leave an incomplete last character to the next part, unless nothing would remain."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(content)
    except UnicodeDecodeError:
        return content
    return content[: len(content) - len(decoder.getstate()[0])] or content
