"""The order in which guards stand around a call. A new concern is its own folder and one line here per link.

Each line says why it stands there. A guard that is switched off has no link; one that has nothing to do with a call is
skipped by its ``when``, so that its code is not entered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import CallResult
from glovebox_server.core.call import Call, Ran
from glovebox_server.core.chain import GuardLink
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.egress import EgressGate
from glovebox_server.guards.admission import guard as admission_guard
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.approvals import guard as approval_guard
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.budgets import guard as budget_guard
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.network.guard import NetworkOpener
from glovebox_server.guards.proposals.guard import Proposer, refuse_unasked
from glovebox_server.guards.redaction import guard as redaction_guard
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.repeats import guard as repeat_guard
from glovebox_server.guards.repeats.repeats import Repeats
from glovebox_server.guards.scanning import guard as scan_guard
from glovebox_server.guards.scanning.guard import FileScanner
from glovebox_server.guards.secret_files import guard as secret_file_guard
from glovebox_server.guards.secret_files.hiding import Hiding
from glovebox_server.guards.stops import guard as stop_guard
from glovebox_server.guards.stops.stops import Stops
from glovebox_server.guards.watch import guard as watch_guard
from glovebox_server.guards.watch.watch import Watch
from glovebox_server.promotion.scanning import Known

if TYPE_CHECKING:
    from glovebox_server.guards.budgets.budgets import Budgets
    from glovebox_server.promotion.proposing import Proposals

_NO_FORMS: Forms = {}


@dataclass(frozen=True, kw_only=True)
class GuardSet:
    """The guards of one server; one that is None is switched off."""

    rights_of: RightsOf
    admission: Admission
    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    stops: Stops | None = None
    repeats: Repeats = field(default_factory=Repeats)
    watch: Watch | None = None
    approvals: Approvals | None = None
    budgets: "Budgets | None" = None
    hiding: Hiding = field(default_factory=Hiding)
    credentials: CredentialCache = field(default_factory=CredentialCache)
    gates: Callable[..., EgressGate] | None = None
    known: Known = field(default_factory=Known)
    proposals: "Callable[[], Proposals] | None" = None
    around_call: Sequence[GuardLink[CallResult]] = field(init=False)
    around_turn: Sequence[GuardLink[CallResult]] = field(init=False)
    around_run: Sequence[GuardLink[Ran]] = field(init=False)

    def __post_init__(self) -> None:
        """Put the links in their order."""
        object.__setattr__(self, "around_call", tuple(_around_call(self)))
        object.__setattr__(self, "around_turn", tuple(_around_turn(self)))
        object.__setattr__(self, "around_run", tuple(_around_run(self)))

    def forms_of(self, rights: Rights) -> Forms:
        """Return the keys that are masked for a caller with these rights."""
        return self.credentials.forms(rights.credentials) if rights.credentials else _NO_FORMS


def _around_call(guards: GuardSet) -> list[GuardLink[CallResult]]:
    links = list[GuardLink[CallResult]]()
    if guards.stops is not None:  # outside everything that waits, so that a stop ends that too
        links.append(GuardLink(guard=partial(stop_guard.refuse, guards.stops)))
    links.append(GuardLink(guard=partial(repeat_guard.slow, guards.repeats)))  # sees how every call ends
    if guards.watch is not None:  # sees every decision, refusals of the guards within it included
        links.append(GuardLink(guard=partial(watch_guard.slow, guards.watch)))
    if guards.approvals is not None:  # a call that waits for a person holds nothing that the guards within it give
        links.append(GuardLink(guard=partial(approval_guard.wait, guards.approvals)))
    links.append(GuardLink(guard=partial(admission_guard.wait_for_turn, guards.admission)))
    return links


def _around_turn(guards: GuardSet) -> list[GuardLink[CallResult]]:
    links = list[GuardLink[CallResult]]()
    proposer = Proposer(
        proposals=guards.proposals,
        scanner=_scanner(guards),
        known=guards.known,
        budgets=guards.budgets,
    )
    # Before the reservation for the run: the scan has its own, and changes are worked out again after each answer.
    links.append(GuardLink(guard=proposer.prepare, when=lambda call: call.tool.proposes))
    if guards.budgets is not None and guards.approvals is not None:
        links.append(GuardLink(guard=approval_guard.lift_budget, when=lambda call: bool(call.now.rights.lifts)))
    if guards.budgets is not None:
        # Outside approvals: a call that no budget is left for uses no approval up.
        links.append(GuardLink(guard=partial(budget_guard.reserve, guards.budgets)))
    if guards.approvals is None:
        links.append(GuardLink(guard=refuse_unasked, when=lambda call: bool(call.now.changes)))
    else:  # last, so that an approval is used up by a call that runs
        links.append(GuardLink(guard=partial(approval_guard.spend, guards.approvals), when=_asks))
    return links


def _around_run(guards: GuardSet) -> list[GuardLink[Ran]]:
    # Before the observers, which look for the placeholders of its keys.
    network = NetworkOpener(credentials=guards.credentials, watch=guards.watch, gates=guards.gates)
    links = [GuardLink(guard=network.open, when=lambda call: call.now.profile.network.mode != "none")]
    if guards.watch is not None:  # sees raw output, before it is masked
        links.append(GuardLink(guard=partial(watch_guard.observe, guards.watch)))
    # Holds output back until it is known that no secret file appeared.
    links.append(GuardLink(guard=partial(secret_file_guard.mask, guards.hiding), when=_sees_workspace))
    # Files are published by then, and taken back with the call.
    links.append(GuardLink(guard=partial(scan_guard.scan, _scanner(guards)), when=_scans))
    # Innermost: what any other guard sees of a result is masked.
    links.append(GuardLink(guard=partial(redaction_guard.mask, guards.forms_of), when=_masks))
    return links


def _scanner(guards: GuardSet) -> FileScanner:
    return FileScanner(sandboxes=guards.sandboxes, artifacts=guards.artifacts, forms_of=guards.forms_of)


def _sees_workspace(call: Call) -> bool:
    return call.tool.imports and call.now.profile.files.workspace != "none" and call.now.rights.workspace is not None


def _scans(call: Call) -> bool:
    return call.now.profile.files.scan


def _masks(call: Call) -> bool:
    return call.now.profile.result.redact != "none"


def _asks(call: Call) -> bool:
    now = call.now
    by_policy = now.rights.approvals or now.rights.lifts or now.changes or now.decision.effect == "ask"
    return bool(by_policy)
