"""The order of the links around a connection, by name; what each does is tried in ``tests/escape/test_egress_*``."""

from typing import Any

import pytest

from glovebox_profiles.egress.rules import EgressDecision
from glovebox_profiles.egress.targets import EgressTarget
from glovebox_server.egress import ConnectNext, EgressAttempt, EgressGate
from glovebox_server.egress.gate import enter
from glovebox_server.guards.credentials.injector import CredentialInjector
from glovebox_server.guards.network.guard import order_links


async def count(attempt: EgressAttempt, connect_next: ConnectNext) -> None:
    """Stand where budgets do."""
    await connect_next(attempt)


async def keep(_attempt: EgressAttempt) -> None:
    """Record nothing."""


def names_of(**guards: Any) -> list[str]:
    """Return the names of the links, outermost first."""
    gate = EgressGate(rules=(), on_decision=keep)
    return [getattr(link, "__name__", "") for link in order_links(gate, **guards)]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("record_refusals", "read_target"),
        ("find_stray", "apply_rules"),  # also of a request that rules refuse
        ("apply_rules", "inject"),  # no helper is started for what is refused
        ("apply_rules", "resolve"),  # GB-NET-5
        ("open_tunnel", "resolve"),
        ("inject", "limit"),
        ("limit", "resolve"),
        ("check_addresses", "count"),  # GB-POL-27
        ("count", "record"),
        ("record", "dial"),  # GB-NET-8
    ],
)
def test_one_link_stands_outside_another(outer: str, inner: str) -> None:
    """With all guards; the control is the number of links."""
    names = names_of(injector=CredentialInjector(credentials=(), read=keep), count=count)  # type: ignore[arg-type]
    assert names.index(outer) < names.index(inner)
    assert (len(names), names[-1]) == (12, "dial")


def test_a_guard_that_is_off_has_no_link() -> None:
    """Neither keys nor budgets."""
    assert len(names_of()) == 9


@pytest.mark.parametrize("effect", ["allow", "deny"])
async def test_nothing_is_dialled_that_is_not_on_record_as_allowed(effect: Any) -> None:
    """Whatever order links were given in; the control is the same attempt, recorded and allowed."""
    dialled = list[str]()

    async def dial(host: str, *_: object) -> Any:
        dialled.append(host)
        raise OSError

    async def use(*_: object) -> None:
        """Never come to."""

    target = EgressTarget(method="GET", scheme="https", host="a.example.org", port=443, path="/")
    gate = EgressGate(rules=(), on_decision=keep, connect_to=dial)
    decision = EgressDecision(effect=effect, rule="r", reason="", hint="")
    for is_recorded in (False, True):
        attempt = EgressAttempt(kind="request", asked="", target=target, use=use)
        attempt.decision, attempt.is_recorded = decision, is_recorded
        allowed = is_recorded and effect == "allow"
        with pytest.raises(OSError if allowed else RuntimeError):
            await enter([gate.dial], attempt)
        assert dialled == ["a.example.org"] * allowed
