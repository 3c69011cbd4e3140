"""Sandboxes that a driver opens for the worker: measured before they are offered, and ended by order."""

import queue
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from anyio.from_thread import start_blocking_portal
from tests.fixtures.channels import READY
from tests.fixtures.pools import PLAN, Fake

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host.host_view import ZygoteView, unseen
from glovebox_sandboxes.session.connection import host_namespaces
from glovebox_sandboxes.worker import place, plans
from glovebox_sandboxes.worker.source import OpenedSandbox, PreparedSandbox, SourceThread
from glovebox_sandboxes.worker.tables import SharedTable


class Source:
    """A source, and what it tells the answering thread."""

    def __init__(self, thread: SourceThread, told: "queue.SimpleQueue[Any]") -> None:
        self.thread, self._told = thread, told
        self.said: list[object] = []
        thread.opened = thread.closed = self.said.append
        thread.start()
        self.next()

    def next(self) -> object:
        """Do what was told next, and return what it said."""
        self._told.get(timeout=30)()
        return self.said[-1]

    def make(self) -> object:
        """Order one."""
        self.thread.make("here", self.said.append)
        return self.next()


@pytest.fixture
def driver() -> Fake:
    """A driver in memory."""
    return Fake()


@pytest.fixture
def source(driver: Fake) -> Iterator[Source]:
    """A source of its sandboxes; it ends."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with start_blocking_portal() as portal:
        found = Source(SourceThread(cast("Any", driver), PLAN, portal, told.put), told)
        assert found.said == [7]
        yield found
        found.thread.stop()
        assert found.next() is None
        assert driver.live == []


def test_one_is_offered_once_it_is_measured_and_ended_by_order(source: Source, driver: Fake) -> None:
    """The control; its counts are asked for, and it may be killed before."""
    made = source.make()
    assert isinstance(made, PreparedSandbox)
    assert source.thread.tables.keys() == {made.table}
    assert (made.fingerprint, made.made.id, len(driver.live)) == ("here", "s1", 1)
    again = source.make()
    assert isinstance(again, PreparedSandbox)
    assert again.table == made.table
    for kill in (False, True):
        source.thread.look(made.made, source.said.append, kill=kill)
        found: Any = source.next()
        assert found.out_of_memory is kill
    for each in (made, again):
        source.thread.end(each.made, source.said.append)
        assert source.next() == ""
    assert driver.live == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"measured": {"capabilities": 1 << 21}}, "capabilities: planned 0x0, found 0x200000"),
        ({"measured": {"namespaces": {}}}, "net"),
        ({"measured": {"namespaces": dict(host_namespaces())}}, "net namespace is not its own|shared with the host"),
        ({"more": b"x"}, "it spoke without a job"),
        ({"problem": SandboxError("Starting", "the daemon is down", "Start it.")}, "the daemon is down"),
        ({"problem": ValueError("nobody foresaw this")}, "nobody foresaw this"),
    ],
    ids=["not as planned", "not measured", "shared", "spoke", "not started", "unforeseen"],
)
@pytest.mark.parametrize("first", [True, False], ids=["the first", "a later one"])
def test_what_is_not_as_planned_is_never_offered(
    source: Source, driver: Fake, wrong: Any, words: str, first: bool
) -> None:
    """It is ended, its problem is told, and the next may be well."""
    if not first:
        before: Any = source.make()
        source.thread.end(before.made, source.said.append)
        source.next()
    for name, value in wrong.items():
        setattr(driver, name, value)
    made = source.make()
    assert isinstance(made, SandboxError)
    assert re.search(words, made.reason)
    assert driver.live == []
    driver.measured, driver.problem, driver.more = {}, None, b""
    well: Any = source.make()
    source.thread.end(well.made, source.said.append)
    assert source.next() == ""


def test_one_whose_channel_holds_more_than_was_asked_is_not_handed_over() -> None:
    """As the part of a frame of the Docker Engine's: who reads on from the socket would lose it."""
    sandbox: Any = type("Sandbox", (), {"channel": type("Channel", (), {"is_between": False})})
    with pytest.raises(SandboxError, match="it spoke without a job"):
        OpenedSandbox(sandbox)


def test_a_driver_that_is_down_is_tried_again_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is refused meanwhile; nothing waits for its connection but who asked. Then a plan has its driver."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    now, tried, found = [0.0], list[bool](), list[Any]()

    def connect(_data: object, _server: str) -> Any:
        tried.append(len(tried) > 0)
        capabilities = SimpleNamespace(usable=tried[-1])
        return nullcontext(SimpleNamespace(capabilities=capabilities, plan=lambda _: PLAN))

    monkeypatch.setattr(plans, "_ENTRIES", {"fake": SimpleNamespace(name="fake", connect=connect)})
    monkeypatch.setattr(plans, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with start_blocking_portal() as portal:
        finder = plans.PlanFinder(Path(), portal, told.put)
        for number in range(3):
            finder.find("fake", PLAN.spec, PLAN.digest, found.append)
            if number == 0:
                told.get(timeout=30)()
        assert ([type(each) for each in found], tried) == ([SandboxError] * 3, [False])
        now[0] += registry.RETRY_SECONDS
        finder.find("fake", PLAN.spec, PLAN.digest, found.append)
        told.get(timeout=30)()
        assert found[-1][1] == PLAN
        finder._drivers["fake"].append(SimpleNamespace(plan=Mock(side_effect=found[0])))
        finder.find("fake", PLAN.spec, PLAN.digest, found.append)
        assert (found[-1], len(tried)) == (found[-2], 2)
        portal.call(portal.stop, True)


def test_a_worker_is_of_one_docker_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with another gets no sandbox of it: a plan does not say of which Engine it is."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert (usual := place.name(Path("/data")), place.engine()) == (place.name(Path("/data")), {})
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/other.sock")
    assert place.engine() == {"DOCKER_HOST": "unix:///run/other.sock"}
    assert place.name(Path("/data")) != usual


def test_a_fork_that_the_host_does_not_see_is_refused() -> None:
    """The control is a container, of which the host may see nothing, and says so."""
    own = host_namespaces()
    body = {**READY, "namespaces": {"net": own["net"] + 1}}
    for zygote in (None, ZygoteView(namespaces={}, filters=0)):
        table, alone = SharedTable.split(body, replace(unseen("it is nowhere"), zygote=zygote))
        refused = pytest.raises(SandboxError, match="saw different processes") if zygote else nullcontext()
        with refused:
            table.require_alone(PLAN, alone, own)
