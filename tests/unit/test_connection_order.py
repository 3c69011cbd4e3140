"""The order of what happens to a connection; what each step does is tried in ``tests/escape/test_egress_*``."""

from ipaddress import ip_address
from typing import Any

import pytest

from glovebox_profiles.egress.rules import EgressDecision, EgressRule
from glovebox_profiles.egress.targets import Address, EgressTarget
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.events import EgressAttempt, EgressLimits
from glovebox_server.egress.gate import EgressGate

ALLOWED = EgressRule(host="a.example.org")
TARGET = EgressTarget(method="GET", scheme="https", host="a.example.org", port=443, path="/")
ORDER = ["find_stray", "inject", "resolve", "count", "record", "dial"]


class _Gate(EgressGate):
    """A gate that keeps the order of its events, and ends where it would dial."""

    def __init__(self, *, address: str = "93.184.216.34", refuses: str = "", **given: Any) -> None:
        self.events, self._refuses = list[str](), refuses

        async def record(_attempt: EgressAttempt) -> None:
            self.note("record")

        async def resolve(_host: str) -> tuple[Address, ...]:
            self.note("resolve")
            return (ip_address(address),)

        async def count(_host: str) -> None:
            self.note("count")

        async def dial(*_: object) -> Any:
            self.note("dial")
            raise OSError

        super().__init__(on_decision=record, keys=self, on_connect=[count], resolver=resolve, connect_to=dial, **given)

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self._refuses:
            raise RefusedError(event, "", "")

    def new_mask(self) -> Any:
        """Never come to."""

    async def find_stray(self, _attempt: EgressAttempt, _target: EgressTarget) -> None:
        self.note("find_stray")

    async def inject(self, _attempt: EgressAttempt, _target: EgressTarget) -> None:
        self.note("inject")


async def events_of(expected: type[Exception], **given: Any) -> list[str]:
    """Return the events of one connection, which ends in an exception."""
    gate = _Gate(**{"rules": [ALLOWED], **given})
    attempt = EgressAttempt(kind="request", asked="", target=TARGET)
    with pytest.raises(expected):
        async with gate.recorded(attempt), gate.connect(attempt, TARGET):
            raise AssertionError
    return gate.events


async def test_a_connection_passes_everything_before_it_is_dialled() -> None:
    """GB-NET-8, GB-POL-27: counted only as what will be dialled, and recorded before."""
    assert await events_of(OSError) == ORDER


@pytest.mark.parametrize("at", ORDER[:4])
async def test_whatever_refuses_is_the_last_before_the_record(at: str) -> None:
    assert await events_of(RefusedError, refuses=at) == [*ORDER[: ORDER.index(at) + 1], "record"]


@pytest.mark.parametrize(
    ("given", "events"),
    [
        ({"rules": []}, ["find_stray"]),  # a name is not resolved (GB-NET-5), and no helper is started for its key
        ({"limits": EgressLimits(connections=0)}, ["find_stray", "inject"]),
        ({"limits": EgressLimits(concurrent=0)}, ["find_stray", "inject"]),
        ({"address": "127.0.0.1"}, ["find_stray", "inject", "resolve"]),  # before it is counted
    ],
)
async def test_the_gate_itself_refuses_in_its_place(given: dict[str, Any], events: list[str]) -> None:
    assert await events_of(RefusedError, **given) == [*events, "record"]


async def test_nothing_is_dialled_whose_decision_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever did so; the control is the connection above, which is dialled."""

    async def change(_gate: object, attempt: EgressAttempt, _target: EgressTarget) -> None:
        attempt.decision = EgressDecision(effect="deny", rule="r", reason="", hint="")

    monkeypatch.setattr(_Gate, "inject", change)
    assert await events_of(RuntimeError) == ["find_stray", "resolve", "count", "record"]
