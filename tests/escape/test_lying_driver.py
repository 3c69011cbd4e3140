"""A driver that says one thing and does another: whichever protection it leaves out, no program runs.

The field is named in the refusal, in the log and in the receipt. The control is the driver as it is.
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.audit_logs import whole_records
from tests.fixtures.brokered import profile, submitted
from tests.fixtures.channels import READY

from _glovebox_guest import wire
from glovebox_audit.chain import Record, new_call_id
from glovebox_audit.receipts.statement import of_call, verify
from glovebox_sandboxes.contract.base import SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.bubblewrap import driver
from glovebox_sandboxes.host import cgroup, process
from glovebox_sandboxes.runtime.runtime import Runtime
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import CallResult
from glovebox_server.receipts.keys import Signer
from glovebox_server.settings import Settings

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

CODE = "print('it ran')"
SHARED = "namespaces shared with the host"


def without(*wanted: str, values: int = 0) -> Callable[[list[str]], list[str]]:
    """Leave out these options, each with so many values."""

    def leave(argv: list[str]) -> list[str]:
        for option in wanted:
            place = argv.index(option)
            del argv[place : place + 1 + values]
        return argv

    return leave


def instead(old: Sequence[str], new: Sequence[str]) -> Callable[[list[str]], list[str]]:
    """Put other words in the place of some that stand together."""

    def replace(argv: list[str]) -> list[str]:
        place = next(n for n in range(len(argv)) if argv[n : n + len(old)] == list(old))
        argv[place : place + len(old)] = new
        return argv

    return replace


@dataclass
class Home:
    """A server whose bubblewrap driver may lie."""

    app: App
    state: Path

    async def call(self, code: str = CODE) -> tuple[CallResult | SandboxError, list[Record]]:
        """One call of ``run_python``; what came of it, and its records."""
        call_id = new_call_id()
        came: CallResult | SandboxError
        try:
            came = await submitted(self.app, "run_python", {"code": code}, call_id=call_id)
        except SandboxError as problem:
            came = problem
        return came, whole_records(self.state / "audit", call_id)


@asynccontextmanager
async def server(tmp_path: Path) -> AsyncIterator[Home]:
    """A whole server with a workspace."""
    tmp_path.chmod(0o755)
    own, workspace = tmp_path / "profiles", tmp_path / "workspace"
    own.mkdir()
    workspace.mkdir(mode=0o755)
    text = profile("run_python", "bubblewrap").replace("[network]", '[files]\nworkspace = "read"\n[network]')
    (own / "run_python.toml").write_text(text)
    settings = Settings(workspace=workspace, profiles_dir=own, state_dir=tmp_path / "state")
    async with apps.opened(settings, "cli") as app:
        yield Home(app, settings.state_dir)


def lie(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]]) -> None:
    """Let the driver plan everything as it should, and run something else."""

    class Liar(driver.Bubblewrap):
        def _argv(self, spec: SandboxSpec, runtime: Runtime, *, zygote: bool) -> tuple[str, ...]:
            argv = super()._argv(spec, runtime, zygote=zygote)
            return argv if zygote else tuple(change(list(argv)))

    monkeypatch.setattr(driver, "Bubblewrap", Liar)


def row(started: Record, field: str) -> dict[str, Any]:
    """One field's row in the record."""
    found: dict[str, Any] = next(each for each in started.data["fields"] if each["field"] == field)
    return found


async def test_the_control_the_driver_as_it_is(tmp_path: Path) -> None:
    """It runs; every field is as planned from every side that can know it, and none was left unmeasured here."""
    async with server(tmp_path) as home:
        came, records = await home.call()
    assert isinstance(came, CallResult)
    assert came.structured["stdout"]["text"] == "it ran\n"
    assert came.structured["isolation"] == {
        "driver": "bubblewrap", "level": "namespaces", "verified": True, "differences": (),
    }  # fmt: skip
    assert {each["verdict"] for each in records[1].data["fields"]} == {"ok"}
    both = {each["field"] for each in records[1].data["fields"] if {"inside", "outside"} <= set(each)}
    assert {"uid", "capabilities", "seccomp", "no_new_privs", "interfaces", "mounts of host files"} <= both
    assert came.meta["receipt"]["uri"] == f"receipt://{records[0].call_id}"
    assert came.meta["receipt"]["digest"] == records[-1].data["digest"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (without("--unshare-net"), SHARED),
        (without("--unshare-net"), "interfaces"),
        (without("--unshare-ipc"), SHARED),
        (lambda argv: without("--unshare-uts")(without("--hostname", values=1)(argv)), SHARED),
        (without("--unshare-cgroup"), SHARED),
        (instead(["--cap-drop", "ALL"], ["--cap-add", "CAP_NET_RAW"]), "capabilities"),
        (without("--seccomp", values=1), "seccomp"),
        (instead(["--ro-bind-fd", "{mount0}"], ["--bind-fd", "{mount0}"]), "writable mounts beyond the plan"),
        (instead(["--ro-bind-fd", "{root}"], ["--bind-fd", "{root}"]), "writable mounts beyond the plan"),
        (instead(["--clearenv"], ["--ro-bind", "/usr", "/opt", "--clearenv"]), "mounts of host files"),
        (without("--uid", values=1), "uid"),
        (without("--gid", values=1), "gid"),
    ],
)
async def test_whatever_it_leaves_out_is_found_before_the_code_runs(
    change: Callable[[list[str]], list[str]], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with the field's name; the log has both measurements; the receipt says that it was not verified."""
    lie(monkeypatch, change)
    async with server(tmp_path) as home:
        came, records = await home.call()
        signer = Signer.load(home.state)
    assert isinstance(came, SandboxError), came
    assert f"{field}: planned" in str(came)
    assert [each.kind for each in records] == ["call.decided", "sandbox.started", "call.failed", "receipt.signed"]
    assert records[1].data["verified"] is False
    found = row(records[1], field)
    assert found["verdict"] == "differs"
    # The host saw the same as the guest: it is not only the guest's word.
    assert found["outside"] == found["inside"] != found["planned"]
    content = of_call(home.state / "audit", str(records[0].call_id))
    assert content is not None
    told = verify(content, signer._key.public_key(), home.state / "audit").statement.predicate
    assert told.isolation is not None
    assert told.isolation.verified is False
    assert (told.outcome.kind, told.outcome.error) == ("call.failed", "SandboxError")


async def test_a_sandbox_among_the_hosts_processes_does_not_even_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pid namespace of its own the guest ends at once, and says why."""

    def change(argv: list[str]) -> list[str]:
        return without("--unshare-pid", "--as-pid-1", "--disable-userns")(argv)

    lie(monkeypatch, change)
    async with server(tmp_path) as home:
        came, records = await home.call()
    assert isinstance(came, SandboxError)
    assert "process 1 of a pid namespace of its own" in str(came)
    assert [each.kind for each in records] == ["call.decided", "call.failed", "receipt.signed"]


@pytest.mark.skipif(cgroup.detect("lie") is None, reason="this host lets us make no control groups")
async def test_a_sandbox_outside_of_its_control_group_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is there and has its limits, but the sandbox is not in it: they would limit nobody."""
    monkeypatch.setattr(cgroup.Cgroup, "tasks", ())
    monkeypatch.setattr(cgroup.Cgroup, "add", lambda *_: None)
    async with server(tmp_path) as home:
        came, _ = await home.call()
    assert isinstance(came, SandboxError)
    assert "in its control group: planned True, found False from outside" in str(came)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be left in a sandbox by mistake")
async def test_what_the_guest_cannot_know_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is as planned inside, but the user of that namespace is the host's root: only the host can tell."""
    monkeypatch.setattr(process, "unprivileged", list)
    async with server(tmp_path) as home:
        came, records = await home.call()
    assert isinstance(came, SandboxError)
    assert "root on the host: planned False, found True from outside" in str(came)
    assert [each["field"] for each in records[1].data["fields"] if each["verdict"] == "differs"] == ["root on the host"]


async def test_a_measurement_forged_by_the_program_changes_nothing(tmp_path: Path) -> None:
    """It writes the guest's own words to every descriptor it has or can open; they are its output, and only that."""
    frame = wire.Wire("guest").message("ready", {**READY, "uid": 0, "seccomp": 0, "capabilities": 1})
    code = f"""
import os
frame = bytes.fromhex({frame.hex()!r})
for number in (3, *range(5, 256)):
    try:
        os.write(number, frame)
    except OSError:
        pass
for number in range(256):
    try:
        open(f"/proc/1/fd/{{number}}", "wb").write(frame)
    except OSError:
        pass
os.write(1, frame)
os.write(4, frame)  # the last word of a program that is over
"""
    async with server(tmp_path) as home:
        came, records = await home.call(code)
        control, others = await home.call()
    assert isinstance(came, CallResult)
    assert isinstance(control, CallResult)
    assert came.structured["isolation"] == control.structured["isolation"]
    assert [each.kind for each in records] == [each.kind for each in others]
    for field in ("uid", "seccomp", "capabilities"):
        assert row(records[1], field) == row(others[1], field)
    assert row(records[1], "seccomp")["inside"] == 2
    assert "ready" in came.structured["stdout"]["text"]
