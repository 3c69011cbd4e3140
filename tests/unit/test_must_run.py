"""Where nothing may be skipped, what is skipped has failed."""

from typing import Literal

import pytest
from tests import conftest


def reported(outcome: Literal["passed", "skipped"], *, expected: bool = False) -> pytest.TestReport:
    """What comes of a test's report on its way through our hook."""
    report: pytest.TestReport = pytest.TestReport(
        "t.py::t", ("t.py", 1, "t"), {}, outcome, ("t.py", 1, "Skipped: not root"), "call"
    )
    if expected:
        report.wasxfail = "a known gap"
    hook = conftest.pytest_runtest_makereport()
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(report)
    assert end.value.value.nodeid == report.nodeid
    return report


def test_with_all_a_skip_is_a_failure_and_says_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was for; without the word, and with others alone, it stays a skip."""
    for words in ("", "docker,podman"):
        monkeypatch.setenv("GLOVEBOX_MUST_RUN", words)
        assert reported("skipped").skipped
    monkeypatch.setenv("GLOVEBOX_MUST_RUN", "docker,all")
    found = reported("skipped")
    assert found.failed
    assert "not root" in str(found.longrepr)


def test_a_known_gap_and_what_passed_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expected failure is reported as skipped too; it has run."""
    monkeypatch.setenv("GLOVEBOX_MUST_RUN", "all")
    assert reported("skipped", expected=True).skipped
    assert reported("passed").passed
