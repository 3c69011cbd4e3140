"""A call that keeps failing in the same way is slowed, then refused; one that succeeds is not."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.fixtures.channels import OUTCOME
from tests.unit.test_broker import Scene, scene

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_server.calls import Principal, ToolCall
from glovebox_server.guards.admission import admission as repeats
from glovebox_server.guards.admission.admission import MAX_FAILING, MOST, Repeats, fingerprint

__all__ = ["scene"]

ME = Principal(id="token:a", transport="http")


class Noted:
    """Repeats on a clock of the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.repeats = Repeats(lambda: self.now)

    def call(
        self, code: str = "1", *, run: str | None = "r_1", principal: Principal = ME, tool: str = "run_python"
    ) -> ToolCall:
        """One call."""
        arguments = {"code": code}
        return ToolCall(
            id="c", principal=principal, session=None, tool=tool, arguments=arguments,
            received=datetime.now(UTC), run=run,
        )  # fmt: skip

    def pause(self, **given: Any) -> float:
        """How long it would wait."""
        return self.repeats.pause(self.call(**given))

    def fail(self, times: int, **given: Any) -> None:
        """It failed so many times."""
        for _ in range(times):
            self.repeats.note(self.call(**given), failed=True)


def test_the_samefailing_call_waits_longer_each_time_and_is_then_refused() -> None:
    """Three tries cost nothing; the control is another call, run and principal."""
    noted, pauses = Noted(), []
    for _ in range(MOST):
        pauses.append(noted.pause())
        assert noted.repeats.refusal(noted.call()) is None
        noted.fail(1)
    assert pauses == [0, 0, 0, 1, 2, 4, 4, 4]
    refused = noted.repeats.refusal(noted.call())
    assert refused is not None
    assert refused.rule == "repeat.failing"
    assert refused.reason == "This same call has failed 8 times in a row in this run."
    assert "tried again in 60 s" in refused.hint
    others: tuple[dict[str, Any], ...] = (
        {"code": "2"}, {"run": "r_2"}, {"principal": Principal(id="token:b", transport="http")}, {"tool": "other"}
    )  # fmt: skip
    for other in others:
        assert noted.pause(**other) == 0
        assert noted.repeats.refusal(noted.call(**other)) is None


def test_after_a_minute_it_is_tried_once() -> None:
    """And refused for another one where it fails again."""
    noted = Noted()
    noted.fail(MOST)
    noted.now += repeats.REFUSED_SECONDS
    assert noted.repeats.refusal(noted.call()) is None
    assert noted.pause() == 0
    noted.fail(1)
    assert noted.repeats.refusal(noted.call()) is not None


def test_one_success_or_ten_quiet_minutes_wipe_its_failures_out() -> None:
    """And calls that succeed are never counted."""
    noted = Noted()
    for _ in range(100):
        noted.repeats.note(noted.call(), failed=False)
    assert noted.pause() == 0
    noted.fail(MOST)
    noted.repeats.note(noted.call(), failed=False)
    assert noted.repeats.refusal(noted.call()) is None
    noted.fail(MOST)
    noted.now += repeats.FORGOTTEN_SECONDS + 1
    assert noted.pause() == 0
    noted.fail(1)
    assert noted.pause() == 0


def test_what_is_forgotten_costs_the_next_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest is made for them; the control is a failure that still counts."""
    noted = Noted()
    made: list[str] = []

    def counted(tool: str, arguments: Mapping[str, Any]) -> bytes:
        made.append(tool)
        return fingerprint(tool, arguments)

    monkeypatch.setattr("glovebox_server.guards.admission.admission.fingerprint", counted)
    noted.fail(1, code="a")
    noted.now += repeats.FORGOTTEN_SECONDS / 2
    noted.fail(1, code="b")
    noted.now += repeats.FORGOTTEN_SECONDS / 2 + 1
    made.clear()
    assert noted.pause() == 0
    assert (len(made), len(noted.repeats.failing)) == (1, 1)
    noted.now += repeats.FORGOTTEN_SECONDS
    made.clear()
    assert noted.pause() == 0
    assert noted.repeats.refusal(noted.call()) is None
    noted.repeats.note(noted.call(), failed=False)
    assert made == []


def test_only_so_manyfailing_calls_are_remembered() -> None:
    """The one that failed longest ago goes first."""
    noted = Noted()
    noted.fail(5, code="old")
    for number in range(MAX_FAILING):
        noted.fail(1, code=str(number))
    assert len(noted.repeats.failing) == MAX_FAILING
    assert noted.pause(code="old") == 0


def test_no_caller_has_what_is_remembered_of_another_forgotten() -> None:
    """However many calls of however many runs it lets fail; the control is that one of its own is forgotten."""
    noted, other = Noted(), Principal(id="token:b", transport="http")
    noted.fail(MOST)
    for number in range(MAX_FAILING):
        noted.fail(1, run=f"r_{number}", principal=other)
    assert len(noted.repeats.failing) == MAX_FAILING
    assert noted.repeats.refusal(noted.call()) is not None
    assert noted.repeats._found(noted.call(run="r_0", principal=other)) is None


def test_blanks_and_comments_make_no_other_program() -> None:
    """Nor do empty lines; the controls are another statement and another depth."""
    noted = Noted()
    for number in range(MOST):
        noted.fail(1, code=f"if a:\n    b()  \n# try {number}\n{chr(10) * number}")
    refused = noted.repeats.refusal(noted.call("if a:\n    b()"))
    assert refused is not None
    assert refused.rule == "repeat.failing"
    for other in ("if a:\n    c()", "if a:\n  b()"):
        assert noted.repeats.refusal(noted.call(other)) is None


@pytest.fixture
def pauses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long calls waited; meanwhile they held neither a turn nor a sandbox."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        assert scene.driver.live == 0
        assert scene.guards.admission._turns._turns == {}
        waited.append(seconds)

    monkeypatch.setattr("glovebox_server.guards.admission.admission.anyio.sleep", sleep)
    return waited


async def test_a_failing_call_is_slowed_then_refused_and_a_good_one_not(scene: Scene, pauses: list[float]) -> None:
    scene.driver.script = lambda guest: guest.done({**OUTCOME, "status": 1})
    results = [(await scene.call()).structured.get("refused", {}).get("rule") for _ in range(9)]
    assert results == [None] * 8 + ["repeat.failing"]
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert scene.driver.opened == 8
    scene.driver.script = None
    assert not any([(await scene.call(code="2")).failed for _ in range(12)])
    assert len(pauses) == 5


async def test_a_call_that_ends_without_a_result_is_slowed_too(scene: Scene, pauses: list[float]) -> None:
    """It keeps failing in the same way as well; the control is another call."""
    scene.driver.problem = SandboxError("Starting", "it died", "Fix it.")
    for _ in range(4):
        with pytest.raises(SandboxError):
            await scene.call()
    scene.driver.problem = None
    await scene.call(code="2")
    assert pauses == [1.0]
