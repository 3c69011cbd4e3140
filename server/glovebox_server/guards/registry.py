"""The order of guards around a call. A new concern is its own folder, and one line here for each link.

Each line says why it stands there. A disabled guard has no link. A guard that does not apply to a call is skipped by
its ``when``, so that its code is not entered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.core.call import Call, Decide, GuardLink, Guards, Objection
from glovebox_server.core.rights import Rights
from glovebox_server.egress.gate import EgressGate
from glovebox_server.guards.admission.admission import Admission, Repeats
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.rules import lift_budget, lift_denial
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.network.guard import open_network
from glovebox_server.guards.proposals.guard import propose, refuse_unasked, scan_files
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.secret_files.hiding import Hiding
from glovebox_server.guards.stops.stops import Stops
from glovebox_server.guards.watch.watch import Watch
from glovebox_server.promotion.proposing import FileScanner, Known

if TYPE_CHECKING:
    from glovebox_server.guards.budgets.budgets import Budgets
    from glovebox_server.promotion.proposing import Proposals


@dataclass(frozen=True, kw_only=True)
class GuardSet(Guards):
    """The guards of one server; None disables one."""

    admission: Admission
    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    credentials: CredentialCache
    stops: Stops | None = None
    repeats: Repeats = field(default_factory=Repeats)
    watch: Watch | None = None
    approvals: Approvals | None = None
    budgets: "Budgets | None" = None
    hiding: Hiding = field(default_factory=Hiding)
    gates: Callable[..., EgressGate] | None = None
    known: Known = field(default_factory=Known)
    proposals: "Callable[[], Proposals] | None" = None

    def __post_init__(self) -> None:
        """Put the links in their order."""
        for name, links in (
            ("objections", _objections(self)),
            ("around_call", _around_call(self)),
            ("before_turn", [GuardLink(guard=self.admission.wait_for_turn)]),
            ("deciders", _deciders(self)),
            ("around_turn", _around_turn(self)),
            ("on_decided", _on_decided(self)),
            ("around_run", _around_run(self)),
            ("on_ended", _on_ended(self)),
        ):
            object.__setattr__(self, name, tuple(links))

    def forms_of(self, rights: Rights) -> Forms:
        """Return the keys that are masked for a caller with these rights."""
        return self.credentials.forms(rights.credentials) if rights.credentials else {}


def _guard(folder: str) -> Any:
    """Return the module ``guard`` of a folder below ``guards``, so that its line here needs no import."""
    return import_module(f"{__package__}.{folder}.guard")


def _objections(guards: GuardSet) -> Iterator[Objection]:
    known = guards.repeats
    if guards.stops is not None:  # first, so that a caller who repeats a call sees the stop
        yield guards.stops.refusal
    yield lambda request: known.refusal(request) if known.failing else None


def _around_call(guards: GuardSet) -> Iterator[GuardLink]:
    if guards.stops is not None:  # outside everything that waits, so that a stop ends that too
        yield GuardLink(guard=guards.stops.end)
    # Before the turn: a slowed call holds nothing.
    yield GuardLink(guard=guards.repeats.slow, when=lambda _: bool(guards.repeats.failing))
    if (watch := guards.watch) is not None:
        yield GuardLink(guard=watch.slow, when=lambda _: bool(watch.runs))


def _deciders(guards: GuardSet) -> Iterator[Callable[[Call, Decide], None]]:
    if guards.approvals is not None:
        yield lambda call, decide: lift_denial(call.now, call.tool, decide) if call.now.rights.lifts else None
    if (watch := guards.watch) is not None:  # after it: what is lifted may be asked about for two reasons
        yield lambda call, _: watch.ask(call) if watch.runs else None


def _around_turn(guards: GuardSet) -> Iterator[GuardLink]:
    prepare = partial(propose, guards.proposals, _scanner(guards), guards.known, guards.budgets)
    # Before the reservation for the run: the scan has its own, and changes are worked out again after each answer.
    yield GuardLink(guard=prepare, when=lambda call: call.tool.proposes)
    if guards.budgets is not None:
        # Before approvals: a call that no budget is left for uses no approval up.
        yield GuardLink(guard=partial(guards.budgets.reserve, lift_budget if guards.approvals else None))
    if guards.approvals is None:
        yield GuardLink(guard=refuse_unasked, when=lambda call: bool(call.now.changes))
    else:  # last, so that an approval is used up by a call that runs
        count = guards.watch.questioned if guards.watch else None
        yield GuardLink(guard=partial(guards.approvals.spend, count), when=_asks)


def _on_decided(guards: GuardSet) -> Iterator[GuardLink]:
    if guards.stops is not None:  # a stop made meanwhile comes first
        yield GuardLink(guard=guards.stops.obey)
    if (watch := guards.watch) is not None:

        def concerns(call: Call) -> bool:
            if watch.runs or call.now.decision.effect == "deny":
                return True
            if watch.actions["canary"] == "off":
                return False
            # There is a canary, or their folder changed since the last look.
            return bool(watch.needles.names) or watch.canaries.look() is not watch.known

        yield GuardLink(guard=watch.look_at_decision, when=concerns)


def _around_run(guards: GuardSet) -> Iterator[GuardLink]:
    # Before the observers, which look for the placeholders of its keys.
    network = partial(open_network, guards.credentials, guards.watch, guards.gates)
    yield GuardLink(guard=network, when=lambda call: call.now.profile.network.mode != "none")
    on_secret = None
    if (watch := guards.watch) is not None:  # sees raw output, before it is masked
        yield GuardLink(guard=watch.observe, when=partial(_observes, watch))
        on_secret = watch.look_for_secrets
    # Holds output back until it is known that no secret file appeared.
    yield GuardLink(guard=guards.hiding.mask, when=_sees_workspace)
    # Files are published by then, and taken back with the call.
    yield GuardLink(guard=partial(scan_files, _scanner(guards)), when=lambda call: call.now.profile.files.scan)
    # Last: what every other guard sees of a result is masked.
    mask = partial(_guard("redaction").mask, guards.forms_of, on_secret)
    yield GuardLink(guard=mask, when=lambda call: call.now.profile.result.redact != "none")


def _on_ended(guards: GuardSet) -> Iterator[Callable[[Call, bool], None]]:
    known = guards.repeats  # a call that ends well wipes out its failures
    yield lambda call, failed: known.note(call.request, failed=failed) if failed or known.failing else None


def _scanner(guards: GuardSet) -> FileScanner:
    return FileScanner(sandboxes=guards.sandboxes, artifacts=guards.artifacts, forms_of=guards.forms_of)


def _observes(watch: Watch, call: Call) -> bool:
    """Return whether raw output is scanned for more than what is masked anyway."""
    now, secrets = call.now, watch.actions["secrets"]
    by_rule = secrets == "stop" or (secrets != "off" and now.profile.result.redact == "none")
    # Canaries as of the decision, a moment before: what is new since then is not looked for in this call.
    return by_rule or bool(now.placeholders) or (watch.actions["canary"] != "off" and bool(watch.needles.names))


def _sees_workspace(call: Call) -> bool:
    return call.tool.imports and call.now.profile.files.workspace != "none" and call.now.rights.workspace is not None


def _asks(call: Call) -> bool:
    now = call.now
    return bool(now.rights.approvals or now.rights.lifts or now.changes or now.decision.effect == "ask")
