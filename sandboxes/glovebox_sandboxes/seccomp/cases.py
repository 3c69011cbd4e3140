"""Calls that the filter must refuse and allow, as data: ``cases.json``, resolved to numbers for one machine.

The unit tests run the cases under bubblewrap, the conformance suite under any driver.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from glovebox_sandboxes.seccomp.filters import number

#: Answer of the allowed neighbour of every case.
ALLOWED = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyscallCase:
    """One refused call and its nearest allowed neighbour."""

    id: str
    rule: str
    """Id of the policy group that decides: a refusal, or an allowance whose conditions do not hold."""
    call: str
    answer: str
    without: tuple[str, ...]
    """Possible answers without the filter: success, or the kernel's own reasons."""
    attempt: Mapping[str, Any]
    neighbour: Mapping[str, Any]


def load_cases(machine: str) -> tuple[SyscallCase, ...]:
    """Return the cases of ``machine`` (as in ``uname -m``): old calls have no number on younger machines.

    Raises SandboxError: libseccomp, which has the numbers, is missing.
    """
    data = json.loads(resources.files(__package__).joinpath("cases.json").read_bytes())
    return tuple(case for entry in data["cases"] if (case := _case(entry, machine)) is not None)


def _case(entry: Mapping[str, Any], machine: str) -> SyscallCase | None:
    if machine not in entry.get("machines", (machine,)):
        return None
    refused = entry.get("number") or number(entry["call"], machine)
    allowed = number(entry["near"]["call"], machine)
    if refused is None or allowed is None:
        return None
    near = entry["near"]
    return SyscallCase(
        **{name: entry[name] for name in ("id", "rule", "call", "answer")},
        without=tuple(entry["without"]),
        attempt={"id": entry["id"], "number": refused, "args": entry["args"], "abi": entry.get("abi", "native")},
        neighbour={"id": f"near {entry['id']}", "number": allowed, "args": near["args"], "abi": "native"},
    )


def attempts(cases: Iterable[SyscallCase]) -> dict[str, str]:
    """Return the code of each attempt and of its neighbour by id, to be run after ``program``; equal for equal ones."""
    both = (attempt for case in cases for attempt in (case.attempt, case.neighbour))
    return {attempt["id"]: f"answer = call({ {**attempt, 'id': ''}!r})" for attempt in both}


def program() -> str:
    """Return the source of ``attempt.py``."""
    return resources.files(__package__).joinpath("attempt.py").read_text()
