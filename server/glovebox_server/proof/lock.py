"""The lock: profiles, policy and tools in effect, as one file to review, keep and sign. Bytes in, bytes out.

It has the digest of each part and each key's value, so that a difference can be named. A lock has one form only, so
that each place in it has one line.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import STATEMENT_TYPE, is_newer
from glovebox_profiles import model as profiles_model
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.reading import KeyPath, dotted, line_of, parse_toml, read_bytes
from glovebox_profiles.policy import model as policy_model
from glovebox_profiles.policy.model import Policy

TYPE = "https://glovebox.dev/lock/v1"
"""A name: nothing is fetched from there. It changes when a field changes its meaning."""

MAX_BYTES = 8 << 20
"""Longest lock: 256 profiles at their largest are half of it."""

PREDICATE_TYPE = "https://glovebox.dev/attestation/lock/v1"
"""A name, as in-toto requires: nothing is fetched from there. It changes when a field changes its meaning."""

_REPAIR = "Take the change back, or review it and run `glovebox profiles lock` again."
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The content that is compared with a lock, and the files it was read from."""

    profiles: ProfileSet
    policy: Policy | None
    policy_path: Path | None
    tools: Mapping[str, Mapping[str, str]]
    """By name: ``listed``, digest of what clients see; ``packages``, digest of what its programs import from."""

    def content(self) -> dict[str, Any]:
        """Return the content of its lock."""
        profiles = {
            tool: {"digest": self.profiles.digests[tool], "keys": profiles_model.effective(profile)}
            for tool, profile in self.profiles.items()
        }
        said = {"type": TYPE, "profiles": profiles, "tools": {name: dict(tool) for name, tool in self.tools.items()}}
        return said if self.policy is None else said | {"policy": _policy(self.policy)}


def _policy(policy: Policy) -> dict[str, Any]:
    return {"digest": policy_model.digest(policy), "keys": policy_keys(policy)}


def policy_keys(policy: Policy) -> dict[str, Any]:
    """Return all that a policy's digest covers: every key in effect, and the order of its roles."""
    return {**policy_model.effective(policy), "precedence": list(policy.roles)}


def written(content: Mapping[str, Any]) -> bytes:
    """Return the one form of a lock: sorted, a value a line."""
    return f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode()


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the key path of each line of a lock."""
    yield path
    if isinstance(value, dict | list) and value:
        for key, each in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
            yield from _paths(each, (*path, key))
        yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock that was read."""

    path: Path
    data: bytes
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a lock. Raises ProfileError if it is unreadable or invalid, or another user can write it."""
        data = read_bytes(path, MAX_BYTES)
        fix = "Write it with `glovebox profiles lock`."
        try:
            content = json.loads(data)
            kind = content["type"]
            parts = [content["profiles"], content["tools"], content.get("policy", {})]
            shaped = content.keys() <= {"type", "profiles", "tools", "policy"}
            shaped = shaped and all(isinstance(each, dict) for each in parts)
            same = len(data) <= MAX_BYTES and written(content) == data
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ProfileError(path, None, "", "is no lock", fix) from None
        if is_newer(kind, TYPE):
            raise ProfileError(path, None, "", f"was made by a newer Glovebox ({kind})", "Upgrade, or lock again.")
        if not (shaped and same and kind == TYPE):
            raise ProfileError(path, None, "", "is not as it was written: it was edited", fix)
        return cls(path=path, data=data, content=content)

    @property
    def digest(self) -> str:
        """Return ``sha256:…`` of the file's bytes."""
        return "sha256:" + hashlib.sha256(self.data).hexdigest()

    @property
    def signature(self) -> Path:
        """Return the place of its signature: a DSSE envelope beside it, as receipts have."""
        return self.path.with_name(f"{self.path.name}.sig")

    def statement(self) -> bytes:
        """Return what is signed: the lock has exactly these bytes. One form, so that the lock determines it."""
        subject = {"name": "glovebox.lock", "digest": {"sha256": hashlib.sha256(self.data).hexdigest()}}
        said = {"_type": STATEMENT_TYPE, "subject": [subject], "predicateType": PREDICATE_TYPE, "predicate": {}}
        return chain.canonical(said)

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """Return the content of its signature."""
        return chain.canonical(dsse.EnvelopeSigner(key).sign(self.statement())) + b"\n"

    def require_signed(self, key_file: Path) -> str:
        """Refuse a lock that the holder of a key did not sign; return the key's id.

        Raises ProfileError if the signature is missing or of another key, or the key cannot be used.
        """
        try:
            key = dsse.parse_public(read_bytes(key_file, dsse.MAX_KEY_BYTES))
        except ValueError as problem:
            raise ProfileError(key_file, None, "", str(problem), "Name the public key.") from None
        fix = f"Review the lock, and sign it: `glovebox profiles sign {self.path} --key KEY`."
        if not self.signature.exists():
            raise ProfileError(self.path, None, "", "is not signed", fix)
        try:
            envelope = dsse.parse(read_bytes(self.signature, dsse.MAX_BYTES))
            dsse.check(envelope, key)
        except EvidenceError as problem:
            raise ProfileError(self.signature, None, "", str(problem), fix) from None
        if envelope.payload != self.statement():
            reason = "it is of another lock, or this one was changed since"
            raise ProfileError(self.signature, None, "", reason, fix)
        return envelope.key_id

    def require(self, found: Effective) -> None:
        """Refuse what differs from the lock. Raises ProfileError: the first difference, and their number."""
        self._refuse(self.differences(found))

    def require_policy(self, policy: Policy | None, path: Path | None) -> None:
        """Compare the policy alone, which may change while a server runs; raises likewise."""
        now = {} if policy is None else {"policy": _policy(policy)}
        was = {key: value for key, value in self.content.items() if key == "policy"}
        self._refuse(self._named(was, now, {} if path is None else {("policy",): path}))

    def differences(self, found: Effective) -> list[ProfileError]:
        """Return each key that differs: its file and line, its value, and its locked value."""
        files: dict[KeyPath, Path] = {("profiles", tool): found.profiles.source(tool) for tool in found.profiles}
        if found.policy_path is not None:
            files["policy",] = found.policy_path
        return self._named(self.content, found.content(), files)

    def _refuse(self, found: list[ProfileError]) -> None:
        if not found:
            return
        more = len(found) - 1
        see = f"; {more} more: `glovebox profiles check --locked {self.path}`" if more else ""
        first = found[0]
        raise ProfileError(first.path, first.line, first.key, f"{first.reason}{see}", first.fix)

    def _named(self, was: Any, now: Any, files: Mapping[KeyPath, Path]) -> list[ProfileError]:
        apart = list(_apart(was, now))
        # The digest of a part only repeats the differences of its keys.
        parts = {path[: path.index("keys")] for path, _, _ in apart if "keys" in path[:3]}
        # The first line of each place.
        own = {path: line for line, path in reversed([*enumerate(_paths(self.content), 1)])}
        lines: dict[Path, Mapping[KeyPath, int]] = {}
        found = []
        for path, before, after in apart:
            if path[-1] == "digest" and path[:-1] in parts:
                continue
            place, line, key = self.path, line_of(path, own), path
            locked = f"not in {place}" if before is _ABSENT else f"{_said(before)} in {place}:{line}"
            reason = f"is {'not there' if after is _ABSENT else _said(after)}, and {locked}"
            if (file := next((file for part, file in files.items() if path[: len(part)] == part), None)) is not None:
                if file not in lines:
                    lines[file] = parse_toml(read_bytes(file), file)[1].lines
                inside = path[path.index("keys") + 1 :] if "keys" in path[:3] else ()
                place, line, key = file, line_of(inside, lines[file]), inside or path
            found.append(ProfileError(place, line, dotted(key), reason, _REPAIR))
        return found


def _said(value: Any) -> str:
    text = json.dumps(value["digest"] if isinstance(value, dict) and "digest" in value else value)
    return text if len(text) <= 100 else f"{text[:100]}…"  # noqa: PLR2004 - of a line


def _apart(was: Any, now: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield where two values differ, as deep as both have the same form."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _apart(was.get(key, _ABSENT), now.get(key, _ABSENT), (*path, key))
    elif isinstance(was, list) and isinstance(now, list):
        for place in range(max(len(was), len(now))):
            one, other = (each[place] if place < len(each) else _ABSENT for each in (was, now))
            yield from _apart(one, other, (*path, place))
    elif type(was) is not type(now) or was != now:
        yield path, was, now
