"""The order of guards around a call. A new concern is its own folder, and one line here for each link.

Each line says why it stands there. A disabled guard has no link. A guard that does not apply to a call is skipped by
its ``when``, so that its code is not entered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.core.call import Call, Decide, GuardLink, Guards, Objection
from glovebox_server.core.rights import Rights
from glovebox_server.egress import EgressGate
from glovebox_server.guards.admission.admission import Admission, wait_for_turn
from glovebox_server.guards.approvals import guard as approval_guard
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.network.guard import NetworkOpener
from glovebox_server.guards.proposals.guard import Proposer, refuse_unasked
from glovebox_server.guards.redaction import guard as redaction_guard
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.repeats import repeats
from glovebox_server.guards.repeats.repeats import Repeats
from glovebox_server.guards.scanning.guard import FileScanner
from glovebox_server.guards.secret_files import hiding as secret_files
from glovebox_server.guards.secret_files.hiding import Hiding
from glovebox_server.guards.stops import stops
from glovebox_server.guards.stops.stops import Stops
from glovebox_server.guards.watch import guard as watch_guard
from glovebox_server.guards.watch.watch import Watch
from glovebox_server.promotion.scanning import Known

if TYPE_CHECKING:
    from glovebox_server.guards.budgets.budgets import Budgets
    from glovebox_server.promotion.proposing import Proposals


@dataclass(frozen=True, kw_only=True)
class GuardSet(Guards):
    """The guards of one server; None disables one."""

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

    def __post_init__(self) -> None:
        """Put the links in their order."""
        for name, links in (
            ("objections", _objections(self)),
            ("around_call", _around_call(self)),
            ("before_turn", [GuardLink(guard=partial(wait_for_turn, self.admission))]),
            ("deciders", _deciders(self)),
            ("around_turn", _around_turn(self)),
            ("on_decided", _on_decided(self)),
            ("around_run", _around_run(self)),
            ("on_ended", [partial(_note_end, self.repeats)]),
        ):
            object.__setattr__(self, name, tuple(links))

    def forms_of(self, rights: Rights) -> Forms:
        """Return the keys that are masked for a caller with these rights."""
        return self.credentials.forms(rights.credentials) if rights.credentials else redaction_guard.NO_FORMS


def _guard(folder: str) -> Any:
    """Return the module ``guard`` of a folder below ``guards``, so that its line here needs no import."""
    return import_module(f"{__package__}.{folder}.guard")


def _objections(guards: GuardSet) -> list[Objection]:
    known = guards.repeats
    objections = list[Objection]([lambda request: known.refusal(request) if known.failing else None])
    if guards.stops is not None:  # first, so that a caller who repeats a call sees the stop
        objections.insert(0, guards.stops.refusal)
    return objections


def _note_end(known: Repeats, call: Call, failed: bool) -> None:
    if failed or known.failing:  # a call that ends well wipes out its failures
        known.note(call.request, failed=failed)


def _around_call(guards: GuardSet) -> list[GuardLink]:
    links = list[GuardLink]()
    if guards.stops is not None:  # outside everything that waits, so that a stop ends that too
        links.append(GuardLink(guard=partial(stops.end, guards.stops)))
    # Before the turn: a slowed call holds nothing.
    links.append(GuardLink(guard=partial(repeats.slow, guards.repeats), when=lambda _: bool(guards.repeats.failing)))
    if (watch := guards.watch) is not None:
        links.append(GuardLink(guard=partial(watch_guard.slow, watch), when=lambda _: bool(watch.runs)))
    return links


def _deciders(guards: GuardSet) -> list[Callable[[Call, Decide], None]]:
    deciders = list[Callable[[Call, Decide], None]]()

    def lift(call: Call, decide: Decide) -> None:
        if call.now.decision.effect == "deny" and call.now.rights.lifts:
            approval_guard.lift(call, decide)

    if guards.approvals is not None:
        deciders.append(lift)
    if (watch := guards.watch) is not None:  # after it: what is lifted may be asked about for two reasons
        deciders.append(lambda call, _: watch_guard.ask(watch, call) if watch.runs else None)
    return deciders


def _around_turn(guards: GuardSet) -> list[GuardLink]:
    links = list[GuardLink]()
    proposer = Proposer(
        proposals=guards.proposals, scanner=_scanner(guards), known=guards.known, budgets=guards.budgets
    )
    # Before the reservation for the run: the scan has its own, and changes are worked out again after each answer.
    links.append(GuardLink(guard=proposer.prepare, when=lambda call: call.tool.proposes))
    if guards.budgets is not None and guards.approvals is not None:
        links.append(GuardLink(guard=approval_guard.lift_budget, when=lambda call: bool(call.now.rights.lifts)))
    if guards.budgets is not None:
        # Before approvals: a call that no budget is left for uses no approval up.
        links.append(GuardLink(guard=partial(_guard("budgets").reserve, guards.budgets)))
    if guards.approvals is None:
        links.append(GuardLink(guard=refuse_unasked, when=lambda call: bool(call.now.changes)))
    else:  # last, so that an approval is used up by a call that runs
        count = guards.watch.questioned if guards.watch else None
        links.append(GuardLink(guard=partial(approval_guard.spend, guards.approvals, count), when=_asks))
    return links


def _on_decided(guards: GuardSet) -> list[GuardLink]:
    links = list[GuardLink]()
    if guards.stops is not None:  # a stop made meanwhile comes first
        links.append(GuardLink(guard=partial(stops.obey, guards.stops)))
    if (watch := guards.watch) is not None:

        def concerns(call: Call) -> bool:
            return bool(watch.runs) or call.now.decision.effect == "deny" or _has_canaries(watch)

        links.append(GuardLink(guard=partial(watch_guard.look_at_decision, watch), when=concerns))
    return links


def _around_run(guards: GuardSet) -> list[GuardLink]:
    # Before the observers, which look for the placeholders of its keys.
    network = NetworkOpener(credentials=guards.credentials, watch=guards.watch, gates=guards.gates)
    links = [GuardLink(guard=network.open, when=lambda call: call.now.profile.network.mode != "none")]
    on_secret = None
    if (watch := guards.watch) is not None:  # sees raw output, before it is masked
        links.append(GuardLink(guard=partial(watch_guard.observe, watch), when=partial(_observes, watch)))
        on_secret = watch.look_for_secrets
    # Holds output back until it is known that no secret file appeared.
    links.append(GuardLink(guard=partial(secret_files.mask, guards.hiding), when=_sees_workspace))
    # Files are published by then, and taken back with the call.
    links.append(GuardLink(guard=partial(_guard("scanning").scan, _scanner(guards)), when=_scans))
    # Last: what every other guard sees of a result is masked.
    links.append(GuardLink(guard=partial(redaction_guard.mask, guards.forms_of, on_secret), when=_masks))
    return links


def _scanner(guards: GuardSet) -> FileScanner:
    return FileScanner(sandboxes=guards.sandboxes, artifacts=guards.artifacts, forms_of=guards.forms_of)


def _has_canaries(watch: Watch) -> bool:
    """Return whether there is a canary, or their folder changed since the last look."""
    if watch.actions["canary"] == "off":
        return False
    return bool(watch.needles.names) or watch.canaries.look() is not watch.known


def _observes(watch: Watch, call: Call) -> bool:
    """Return whether raw output is scanned for more than what is masked anyway."""
    now, secrets = call.now, watch.actions["secrets"]
    by_rule = secrets == "stop" or (secrets != "off" and now.profile.result.redact == "none")
    # Canaries as of the decision, a moment before: what is new since then is not looked for in this call.
    return by_rule or bool(now.placeholders) or (watch.actions["canary"] != "off" and bool(watch.needles.names))


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
