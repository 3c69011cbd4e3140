"""Where a credential's value comes from: each source, what it may be, and what is said when it is not."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.explain import explain
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import Credential, Network
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_server.guards.credentials import sources
from glovebox_server.guards.credentials.injector import CredentialInjector
from glovebox_server.guards.credentials.sources import CredentialCache, read, unusable
from glovebox_server.guards.network.guard import make_injector
from glovebox_server.guards.redaction.detector import derive_forms

KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0"
SETTING_UP = ("PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "SSL_CERT_FILE", "path", "A=B")
Program = Callable[[str], str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def make(lines: str) -> str:
        path = tmp_path / "helper"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o700)
        return f"exec:{path} --for tracker"

    return make


async def test_a_variable_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset it is refused, without its name: a key may have been put where the name belongs."""
    keys = CredentialCache(cast("Any", None))
    with pytest.raises(DiagnosedError, match="its variable is not set or empty") as refusal:
        await keys.value("env:TRACKER_TOKEN")
    assert "TRACKER_TOKEN" not in f"{refusal.value} {refusal.value.fix}"
    monkeypatch.setenv("TRACKER_TOKEN", KEY)
    assert (await keys.value("env:TRACKER_TOKEN")).text == KEY


@pytest.mark.parametrize("value", [KEY, "0123456789abcdef", "a1" * 8 + "-", "r" * 8192, f"{KEY}X"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
async def test_a_file_holds_a_value_and_maybe_a_line_end(tmp_path: Path, value: str, end: str) -> None:
    """Its name may hold a colon; a FIFO in its place holds nobody up."""
    file = tmp_path / "a:key"
    file.write_bytes((value + end).encode())
    file.chmod(0o600)
    assert (await read(f"file:{file}")).text == value
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DiagnosedError, match="no plain file"):
        await read(f"file:{file}")


async def test_a_program_prints_a_value_and_its_expiry(program: Program) -> None:
    """As JSON of some size; without an expiry it has none, without a time zone it is in UTC. It is asked nothing."""
    year = datetime(2999, 1, 1, tzinfo=UTC)
    for expires, then in ((None, None), ("2999-01-01T00:00:00Z", year), ("2999-01-01T00:00:00", year)):
        printed = json.dumps({"value": KEY, "expires": expires, "kind": "of no matter"}).ljust(sources.MAX_BYTES - 1)
        value = await read(program(f"cat\ncat <<'END'\n{printed}\nEND"))
        assert (value.text, value.expires) == (KEY, then)
        assert KEY not in repr(value)


async def test_a_program_that_hangs_ends_with_its_own(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "SECONDS", 0.3)
    with pytest.raises(DiagnosedError, match=r"within 0\.3 seconds"):
        await read(program(f"sleep 60 & echo $! > {tmp_path}/child\nwait"))
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while (status := Path(f"/proc/{child}/stat")).exists() and " Z " not in status.read_text():
        assert time.monotonic() < deadline
        await anyio.sleep(0.01)


async def test_nobody_waits_for_what_cannot_be_ended(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that sudo started as another user: it is said to be too slow, at its time. The control ended in time."""

    def refused(*_: int) -> None:
        raise PermissionError("Operation not permitted")

    source = program(f"echo $$ > {tmp_path}/itself\nexec sleep 30")
    with monkeypatch.context() as patched:
        patched.setattr(sources, "SECONDS", 0.3)
        patched.setattr(os, "killpg", refused)
        patched.setattr(os, "kill", refused)
        with anyio.fail_after(10):
            with pytest.raises(DiagnosedError, match=r"within 0\.3 seconds"):
                await read(source)
    itself = int((tmp_path / "itself").read_text())
    os.kill(itself, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{itself}").exists():
        assert time.monotonic() < deadline
        await anyio.sleep(0.01)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", refused)
        assert (await read(program(f"echo '{json.dumps({'value': KEY})}'"))).text == KEY


async def test_one_reading_at_a_time_and_none_while_the_value_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen who ask at once; then one more once it is about to expire."""
    now, readings = [datetime(2026, 1, 1, tzinfo=UTC)], list[str]()

    async def reading(source: str) -> sources.CredentialValue:
        readings.append(source)
        await anyio.sleep(0.01)
        return sources.CredentialValue(text=KEY, expires=now[0] + timedelta(minutes=10))

    monkeypatch.setattr(sources, "read", reading)
    async with anyio.create_task_group() as reads:
        keys = CredentialCache(reads, clock=lambda: now[0])
        async with anyio.create_task_group() as tasks:
            for _ in range(16):
                tasks.start_soon(keys.value, "exec:/helper")
        assert len(readings) == 1
        now[0] += timedelta(minutes=8)
        await keys.value("exec:/helper")
        assert len(readings) == 1
        now[0] += timedelta(seconds=90)
        await keys.value("exec:/helper")
        assert readings == ["exec:/helper"] * 2


async def test_a_value_that_expires_is_read_ahead_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for ten times while the next is read; a failure costs nothing while the one that is held is good."""
    now, readings, go = [datetime(2026, 1, 1, tzinfo=UTC)], list[str](), anyio.Event()
    lives = timedelta(minutes=10)

    async def reading(source: str) -> sources.CredentialValue:
        readings.append(source)
        if len(readings) == 2:
            raise unusable("its program ended with status 1", "Run it by hand.")
        if len(readings) == 3:
            await go.wait()
        return sources.CredentialValue(text=f"{KEY}{len(readings)}", expires=now[0] + lives)

    monkeypatch.setattr(sources, "read", reading)
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks, clock=lambda: now[0])
        assert (await keys.value("exec:/helper")).text == f"{KEY}1"
        for later, then in ((timedelta(minutes=8, seconds=20), 1), (timedelta(seconds=10), 2), (sources.AGAIN, 3)):
            now[0] += later
            for _ in range(10):
                assert (await keys.value("exec:/helper")).text == f"{KEY}1"
                await anyio.wait_all_tasks_blocked()
            assert len(readings) == then
        go.set()
        await anyio.wait_all_tasks_blocked()
        assert (await keys.value("exec:/helper")).text == f"{KEY}3"
        assert len(readings) == 3
        lives = timedelta(seconds=70)
        now[0] += timedelta(minutes=20)
        for _ in range(10):
            await keys.value("exec:/helper")
            await anyio.wait_all_tasks_blocked()
        assert len(readings) == 4  # one that lives for a minute is not read at each request


async def test_one_reading_serves_all_who_wait_though_its_value_hardly_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that hands out the last seconds of a token: who asks again at once takes it from no other."""
    now, readings = datetime(2026, 1, 1, tzinfo=UTC), list[str]()

    async def reading(source: str) -> sources.CredentialValue:
        readings.append(source)
        await anyio.sleep(0.01)
        return sources.CredentialValue(text=f"{KEY}{len(readings)}", expires=now + sources.EARLY / 2)

    monkeypatch.setattr(sources, "read", reading)
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks, clock=lambda: now)

        async def ask() -> None:
            for _ in range(4):
                await keys.value("exec:/helper")

        async with anyio.create_task_group() as calls:
            for _ in range(3):
                calls.start_soon(ask)
    assert len(readings) == 4


async def test_requests_that_are_given_up_start_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that hangs up before the value is there, again and again; the control is who waits for it."""
    readings, go = list[str](), anyio.Event()

    async def reading(source: str) -> sources.CredentialValue:
        readings.append(source)
        await go.wait()
        return sources.CredentialValue(text=KEY)

    monkeypatch.setattr(sources, "read", reading)
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks)
        for _ in range(10):
            with anyio.move_on_after(0.01) as given_up:
                await keys.value("exec:/helper")
            assert given_up.cancelled_caught
        go.set()
        assert (await keys.value("exec:/helper")).text == KEY
    assert len(readings) == 1


async def test_who_waits_while_the_server_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that is ended with the server leaves nobody waiting; the next is another."""

    async def reading(_source: str) -> sources.CredentialValue:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(sources, "read", reading)
    failures = list[DiagnosedError]()
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks)

        async def wait() -> None:
            with pytest.raises(DiagnosedError) as failure:
                await keys.value("exec:/helper")
            failures.append(failure.value)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as calls:
                calls.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
    assert [each.reason for each in failures] == ["the server was ending"]


async def test_a_source_that_fails_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that asks in a loop starts no storm of helpers; later it is tried again.

    What was read before is lent for a minute, as it has no expiry, and no longer.
    """
    now, readings = [datetime(2026, 1, 1, tzinfo=UTC)], list[str]()

    async def failing(source: str) -> sources.CredentialValue:
        readings.append(source)
        if len(readings) > 1:
            raise unusable("its program ended with status 1", "Run it by hand.")
        return sources.CredentialValue(text=KEY)

    monkeypatch.setattr(sources, "read", failing)
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks, clock=lambda: now[0])
        for later in (timedelta(0), sources.UNSAID - timedelta(seconds=1)):
            now[0] += later
            assert (await keys.value("exec:/helper")).text == KEY
            await anyio.wait_all_tasks_blocked()
        assert len(readings) == 1
        for later, then in ((timedelta(seconds=1), 2), (sources.AGAIN, 3)):
            now[0] += later
            for _ in range(10):
                with pytest.raises(DiagnosedError, match="status 1"):
                    await keys.value("exec:/helper")
            assert len(readings) == then


async def test_a_source_that_never_gave_a_value_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that asks in a loop starts no storm of helpers; later it is tried again."""
    now, readings = [datetime(2026, 1, 1, tzinfo=UTC)], list[str]()

    async def failing(source: str) -> sources.CredentialValue:
        readings.append(source)
        raise unusable("its program ended with status 1", "Run it by hand.")

    monkeypatch.setattr(sources, "read", failing)
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks, clock=lambda: now[0])
        for _ in range(10):
            with pytest.raises(DiagnosedError):
                await keys.value("exec:/helper")
        assert len(readings) == 1
        now[0] += sources.AGAIN
        with pytest.raises(DiagnosedError):
            await keys.value("exec:/helper")
        assert len(readings) == 2


async def test_a_value_that_was_replaced_is_looked_for_some_time_longer(tmp_path: Path) -> None:
    """Those used last of each source: an old one may still be valid, in results and in what servers answer."""
    values = [f"{KEY}{n}" for n in range(sources.KEPT + 1)]
    keys, file = CredentialCache(cast("Any", None)), tmp_path / "key"
    file.touch(mode=0o600)
    lent = [
        Credential(name="tracker", host="a.example.org", paths=("/*",), header="Key", source=f"file:{file}"),
        Credential(name="unused", host="b.example.org", paths=("/*",), header="Key", source="env:OTHER_TOKEN"),
    ]
    assert keys.used(lent) == {}
    for value in (*values[:2], values[0], *values[2:]):
        file.write_text(value)
        await keys.value(f"file:{file}")
        assert derive_forms("of the server", value).items() <= keys.forms(lent).items()
    found = [value for value in values if derive_forms("", value).keys() <= keys.forms(lent).keys()]
    assert found == [values[0], *values[2:]]
    assert keys.used(lent).keys() == keys.forms(lent).keys()
    assert keys.forms(lent) is keys.forms(lent)
    assert set(keys.used(lent).values()) == {"tracker"}
    assert keys.used(lent[1:]) == keys.forms(lent[1:]) == {}
    rule, nobody = EgressRule(host="a.example.org"), cast("Any", None)

    def a_call(profile: Any, *others: Credential) -> Any:
        who = SimpleNamespace(principal=SimpleNamespace(id="local:1"))
        now = SimpleNamespace(rights=SimpleNamespace(credentials=others), on_connect=[], max_connections=[])
        now.profile, now.records = profile, nobody
        return SimpleNamespace(now=now, request=who)

    network = Network(mode="egress", allow=(rule,), credential=(lent[0],))
    profile = load([SHIPPED], check_example=None)["fetch_url"].model_copy(update={"network": network})
    injector = make_injector(a_call(profile), keys)
    assert injector is not None
    assert injector.used == keys.used(lent)
    network = network.model_copy(update={"credential": ()})  # what another tool of the caller has is replaced too
    profile = profile.model_copy(update={"network": network})
    injector = make_injector(a_call(profile, *lent), keys)
    assert injector is not None
    assert injector.used == keys.used(lent)
    assert make_injector(a_call(profile), keys) is None


async def test_a_value_is_known_before_anybody_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is cancelled while its forms are made leaves nothing behind that the next could get without them."""

    async def reading(_source: str) -> sources.CredentialValue:
        return sources.CredentialValue(text=KEY)

    async def cancelled(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(sources, "read", reading)
    lent = [Credential(name="key", host="a.example.org", paths=("/*",), header="Key", source="exec:/helper")]
    async with anyio.create_task_group() as tasks:
        keys = CredentialCache(tasks)
        with monkeypatch.context() as patch:
            patch.setattr(anyio.to_thread, "run_sync", cancelled)
            with pytest.raises(TimeoutError):
                await keys.value("exec:/helper")
        assert keys.forms(lent) == {}
        await keys.value("exec:/helper")
    assert derive_forms("", KEY).keys() == keys.forms(lent).keys()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"header": None}, "takes either header or query"),
        ({"query": "key"}, "takes either header or query"),
        ({"header": "Host"}, "frames or routes"),
        ({"header": "Range"}, "frames or routes"),
        ({"header": None, "query": "key", "prefix": "x"}, "prefix in a header only"),
        ({"host": "*.example.org"}, "one host"),
        ({"host": "localhost"}, "local"),
        ({"paths": ("v1",)}, "paths"),
        ({"methods": ("TRACE",)}, "methods"),
        ({"methods": ("CONNECT",), "paths": ("/*",)}, "tunnel"),
        ({"source": "literal:abc"}, "match pattern"),
        ({"source": "file:key"}, "absolute"),
        ({"source": "env:TRACKER TOKEN"}, "variable's name"),
        ({"source": "keyring:tracker/me"}, "match pattern"),
        ({"source": "exec:helper"}, "absolute"),
        ({"source": "exec:/opt/helper --for 'the tracker"}, "no command line.*closing quotation"),
        *(({"env": name}, "env") for name in SETTING_UP),
    ],
)
def test_a_credential_that_could_not_be_kept_is_no_part_of_a_profile(changed: dict[str, Any], reason: str) -> None:
    """Each with the reason; the control is the one that it was changed from."""
    given = {"name": "tracker", "host": "api.example.org", "paths": ("/v1/*",), "header": "Authorization",
             "source": "env:TRACKER_TOKEN", "env": "GITHUB_TOKEN"}  # fmt: skip
    assert Credential.model_validate(given).methods == ("GET", "HEAD")
    with pytest.raises(ValueError, match=reason):
        Credential.model_validate(given | changed)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("exit 3", "its program ended with status 3"),
        ("sleep 60", "its program did not end within 0.3 seconds"),
        (f"echo 'token: {KEY}'", "its program did not print such JSON as it has to"),
        (f'echo \'{{"value": "{KEY}", "expires": "2001-01-01T00:00:00Z"}}\'', "what its program printed has expired"),
    ],
    ids=["fails", "hangs", "garbage", "expired"],
)
async def test_a_bad_source_refuses_the_request_with_its_name_and_the_fix(
    program: Program, monkeypatch: pytest.MonkeyPatch, lines: str, reason: str
) -> None:
    """What a call is told; the value is in none of it. The control: a source that is mended gives the value."""
    monkeypatch.setattr(sources, "SECONDS", 0.3)
    lent = Credential(name="tracker", host="a.example.org", paths=("/*",), header="Key", source=program(lines))
    with pytest.raises(RefusedError) as refused:
        await CredentialInjector(credentials=(lent,), read=read).read_value(lent)
    assert refused.value.rule == "egress.credential"
    assert refused.value.reason == f"The credential tracker cannot be used: {reason}."
    assert refused.value.hint.startswith("The operator must act. ")
    assert KEY not in f"{refused.value}{refused.value.hint}"
    monkeypatch.setattr(sources, "SECONDS", 10.0)
    program(f"echo '{json.dumps({'value': KEY})}'")
    assert await CredentialInjector(credentials=(lent,), read=read).read_value(lent) == KEY


def test_explain_says_what_a_tool_can_do_with_a_key_and_where_it_can_send_it() -> None:
    given = {"host": "api.example.org", "paths": ("/v1/*",), "header": "Authorization", "source": "env:TRACKER_SOURCE"}
    lent = [
        Credential.model_validate({"name": "tracker", **given}),
        Credential.model_validate({"name": "hub", **given, "methods": ("POST",), "env": "HUB_TOKEN"}),
    ]
    rule = EgressRule.model_validate({"host": "api.example.org", "methods": ["GET", "HEAD", "POST"]})
    network = Network(mode="egress", allow=(rule,), credential=tuple(lent))
    profile = load([SHIPPED], check_example=None)["run_python"].model_copy(update={"network": network})
    said = next(each for each in explain(profile) if any("With the key" in one for one in each.sentences)).sentences
    comes = "That key comes from env:TRACKER_SOURCE. The broker adds it, as header Authorization, over TLS and to "
    may = "which is whatever that key may do there."
    assert said[-5:] == (
        f"With the key tracker: https://api.example.org (GET, HEAD; only /v1/*), {may}",
        f"{comes}api.example.org alone.",
        f"With the key hub: https://api.example.org (POST; only /v1/*), {may}",
        f"{comes}api.example.org alone.",
        "Only where a program put there what it finds in HUB_TOKEN, which is no key.",
    )
