"""The seccomp policy as data: read, checked, digested. No libseccomp here, so every system can explain the policy.

``policy.json`` beside this file is the only source; ``docs/internals/seccomp.md`` says how to read it.
"""

import errno
import hashlib
import itertools
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

#: Bits of one system-call argument. The kernel reads most flags as 32 bits, so a comparison says which bits it means.
FULL_MASK = 0xFFFF_FFFF_FFFF_FFFF
#: Arguments of one system call: seccomp_data in seccomp(2).
MAX_ARGUMENTS = 6

_ERRNOS = {"0": 0} | {name: number for number, name in errno.errorcode.items()}


def _errno(name: Any) -> Any:
    if isinstance(name, str) and name not in _ERRNOS:
        raise ValueError(f"{name!r} is no errno name")
    return _ERRNOS[name] if isinstance(name, str) else name


_Errno = Annotated[int, BeforeValidator(_errno)]
_Bits = Annotated[
    int, BeforeValidator(lambda said: int(said, 0) if isinstance(said, str) else said), Field(ge=0, le=FULL_MASK)
]
_Values = Annotated[
    tuple[tuple[str, _Bits], ...],
    BeforeValidator(lambda said: tuple(said.items()) if isinstance(said, Mapping) else said),
]


class _Part(BaseModel):
    """Base of all parts of the file; errors name it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, title="policy.json", validate_by_name=True, validate_by_alias=True
    )


class Condition(_Part):
    """One comparison: ``argument & mask`` is one of ``values``."""

    argument: int = Field(ge=0, lt=MAX_ARGUMENTS)
    mask: _Bits = FULL_MASK
    values: _Values = Field(alias="is", min_length=1)


class _Group(_Part):
    id: str
    syscalls: tuple[str, ...]
    when: tuple[Condition, ...] = ()

    def alternatives(self) -> tuple[tuple[tuple[Condition, int], ...], ...]:
        """Return every combination of one value per condition; one empty combination when there are no conditions."""
        return tuple(itertools.product(*([(each, value) for _, value in each.values] for each in self.when)))


class Allow(_Group):
    """System calls that programs may make, under every one of the conditions."""

    needed_by: str


class Refuse(_Group):
    """System calls that are refused on purpose; with conditions, those whose arguments meet them."""

    errno: _Errno = -1
    """The answer: 0 if the program gets success although nothing is done; if left out, the policy's own."""
    why: str
    link: str


class SeccompPolicy(_Part):
    """The system calls of one sandboxed program. Calls that are not allowed are refused."""

    about: str
    source: str
    errno: _Errno = Field(validation_alias=AliasPath("otherwise", "errno"))
    """Answer to every call that no rule names."""
    newer_errno: _Errno = Field(validation_alias=AliasPath("newer", "errno"))
    """Answer to every call with a number above all numbers in the policy."""
    foreign: Mapping[str, str]
    architectures: tuple[str, ...]
    """As in ``uname -m``; a program of any other architecture is killed at its first call."""
    allow: tuple[Allow, ...]
    refuse: tuple[Refuse, ...]


def parse(content: bytes) -> SeccompPolicy:
    """Read a policy, strictly.

    Raises ValueError: It is not JSON of the form that seccomp.md describes. Contradictions are found by a test.
    """
    policy = SeccompPolicy.model_validate_json(content)
    own = {"errno": policy.errno}
    refuse = tuple(each if each.errno >= 0 else each.model_copy(update=own) for each in policy.refuse)
    return policy.model_copy(update={"refuse": refuse})


@cache
def source() -> bytes:
    """Return the packaged policy file, byte for byte."""
    return resources.files(__package__).joinpath("policy.json").read_bytes()


@cache
def load() -> SeccompPolicy:
    """Return the packaged policy. Raises ValueError as :func:`parse`."""
    return parse(source())


@cache
def digest() -> str:
    """Return ``sha256:…`` of the policy file, for plans and audit records."""
    return "sha256:" + hashlib.sha256(source()).hexdigest()
