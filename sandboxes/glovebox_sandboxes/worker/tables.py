"""Split what sandboxes of a plan share from what each has alone: the former is compared in full, once. Pure.

The worker offers no sandbox that differs, and the server checks each that it gets by the plan that it made itself.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from glovebox_sandboxes.contract.attestation import Attestation, compare, describe
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import Measured, MeasuredMount, parse
from glovebox_sandboxes.host.host_view import HostView, ZygoteView
from glovebox_sandboxes.host.identity import kernels_root

_EACH = ("namespaces", "uids", "gids")
"""Parts of the host's view that no two sandboxes share."""
_UNUSED = ("status",)
_FIX = "Run `glovebox doctor`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Measurements that no other sandbox shares: namespaces as seen from both sides, and users on the host."""

    namespaces: Mapping[str, int]
    outside: Mapping[str, Any]
    zygote: Mapping[str, int]
    """Namespaces of its zygote, which it shares with forks of that one only; empty without one."""


@dataclass(frozen=True, kw_only=True)
class SharedTable:
    """Measurements that sandboxes of a plan share, as the guest and the host's kernel told them."""

    body: Mapping[str, Any]
    """The guest's message without its namespaces."""
    parts: Mapping[str, Any]
    view: HostView
    """Its parts are in ``parts``."""
    root: int | None = field(default_factory=kernels_root, compare=False)
    """The host's root, by our numbers."""

    @classmethod
    def split(cls, body: Mapping[str, Any], view: HostView) -> tuple[Self, Alone]:
        """Separate what sandboxes share from what each has alone."""
        alone = Alone(
            namespaces=body.get("namespaces", {}),
            outside={name: view.parts[name] for name in _EACH if name in view.parts},
            zygote=view.zygote.namespaces if view.zygote else {},
        )
        zygote = view.zygote and replace(view.zygote, namespaces={})
        parts = {name: value for name, value in view.parts.items() if name not in (*_EACH, *_UNUSED)}
        shared = {name: value for name, value in body.items() if name != "namespaces"}
        return cls(body=shared, parts=parts, view=replace(view, parts={}, zygote=zygote)), alone

    def encoded(self) -> dict[str, Any]:
        """Return it as JSON."""
        parts = {**self.parts, "mounts": [each.model_dump() for each in self.parts.get("mounts", ())]}
        told: dict[str, Any] = {**asdict(self.view), "body": self.body, "parts": parts}
        return told

    @classmethod
    def decoded(cls, told: Mapping[str, Any]) -> Self:
        """Read what ``encoded`` returned; raises LookupError, TypeError or ValueError for anything else."""
        parts = dict(told["parts"])
        mounts = tuple(MeasuredMount.model_validate(each) for each in parts.pop("mounts"))
        zygote = None if told["zygote"] is None else ZygoteView(**told["zygote"])
        view = HostView(zygote=zygote, unread=told["unread"], compared=told["compared"])
        return cls(body=told["body"], parts={**parts, "mounts": mounts}, view=view)

    @property
    def digest(self) -> str:
        """Return the digest of its JSON."""
        text = json.dumps(self.encoded(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def attest(self, plan: Plan, alone: Alone, own: Mapping[str, int]) -> tuple[Measured, Attestation]:
        """Compare all of one sandbox with its plan; ``own`` are namespaces that it must not share.

        Raises SandboxError if it is not as planned, or the guest's message is no measurement.
        """
        measured = parse({**self.body, "namespaces": alone.namespaces})
        zygote = self.view.zygote and replace(self.view.zygote, namespaces=alone.zygote)
        view = replace(self.view, parts={**self.parts, **alone.outside}, zygote=zygote)
        attestation = compare(plan.expected, measured, view, own)
        if attestation.differences:
            raise _unplanned(describe(attestation.differences))
        return measured, attestation

    def require_alone(self, plan: Plan, alone: Alone, own: Mapping[str, int]) -> None:
        """Raise SandboxError unless a sandbox that shares all of this has namespaces and a user of its own."""
        for name in plan.expected.namespaces:
            number = alone.namespaces.get(name)
            if number in {None, own[name]} or (self.view.zygote and number in {None, alone.zygote.get(name)}):
                raise _unplanned(f"its {name} namespace is not its own")
        if "" in self.view.unread and not self.view.zygote:
            return  # of a container the host may see nothing, and says so; a fork it sees
        there = alone.outside.get("namespaces", {})
        same_kernel = plan.expected.system == "linux"
        if same_kernel and {name: there.get(name) for name in alone.namespaces} != alone.namespaces:
            raise _unplanned("the guest and the host saw different processes")
        if not alone.outside.get("uids") or self.root in alone.outside["uids"]:
            raise _unplanned("its user on the host is root, or not known")


def _unplanned(reason: str) -> SandboxError:
    return SandboxError("Proving a sandbox's isolation", f"it is not what was planned ({reason})", _FIX)
