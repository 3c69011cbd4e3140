"""Notifications: what is told of which record, to whom, how often, by which process; and never at a call's expense."""

import hmac
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from subprocess import PIPE, Popen  # noqa: TID251 - whole server processes are what is tested
from typing import Any

import anyio
import psutil
import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import log_lines, replace_lines
from tests.fixtures.receiving import Answering, Receiver, Request, closed, huge, never, receiving, says
from tests.interaction.served import until, whole_server
from tests.interaction.test_asking import options
from tests.repo.files import ROOT

from glovebox_audit import writers
from glovebox_audit.chain import Draft
from glovebox_audit.event import Event
from glovebox_audit.events import ApprovalAnswered, ApprovalRequested, ApprovalWithdrawn, StopMade, WatchAlarm
from glovebox_audit.log import AuditLog
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.notify import news, sender
from glovebox_server.notify.news import News
from glovebox_server.notify.sender import Answer, Target
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import audit_log, recording

__all__ = ["options"]

SECONDS = 60.0
HOSTILE = "oauth:https://e.example#`<!channel>`\u202e\n&" + "x" * 200
"""A caller's id, as an authorization server may have let its subject choose it."""
SHOWN = "`oauth:https://e.example#⟪U+0060⟫<!channel>⟪U+0060⟫⟪U+202E⟫⟪U+000A⟫&" + "x" * 89 + "…`"
TEST = News("i", "test", "It says <&>.", "now")


def stopped(name: str, **changed: str) -> StopMade:
    given = {"stop": "s_1", "scope": "tool", "name": name, "because": "B", "by": "local:0"} | changed
    return StopMade(**given)


def told(name: str) -> str:
    """What is told of ``stopped``."""
    return f"s_1: `local:0` stopped tool `{name}`: `B`"


def question(number: int) -> dict[str, Any]:
    return {"approval": f"a_{number}", "digest": "d", "principal": HOSTILE, "run": "r", "tool": "run_python"}


def answered(number: int, state: str) -> ApprovalAnswered:
    said: Any = {"effect": "deny", "channel": "operator", "reach": "call"}
    return ApprovalAnswered(**question(number), **said, answered_by="x", yes=0, state=state)


def requested(number: int, by: Any = "either") -> ApprovalRequested:
    return ApprovalRequested(
        **question(number), asked_by="c", rules=("r",), arguments_digest="d", profile_digest="d", by=by, quorum=1,
        another_principal=False, reach="call", seconds=600.0, lifted="host", target="canary:443", client="canary",
    )  # fmt: skip


@pytest.fixture
def receiver() -> Any:
    with receiving() as found:
        yield found


@pytest.fixture
def settings(tmp_path: Path, receiver: Receiver) -> Settings:
    (tmp_path / "state").mkdir(mode=0o700)
    return Settings(state_dir=tmp_path / "state", notify=receiver.url)


async def settled(settings: Settings, **wanted: Any) -> None:
    """Wait until what arrived is noted as sent, too: else a process that ends now leaves it to the next."""
    path = settings.state_dir / "notify" / "position.json"
    await until(lambda: json.loads(path.read_bytes()).items() >= {"tries": 0, **wanted}.items(), SECONDS)


def write(settings: Settings, *events: Event) -> None:
    """Record events as a command does, in a process of its own as far as the log can tell."""
    with recording(settings) as record:
        for event in events:
            record(event)


@pytest.mark.parametrize(
    ("answering", "expected"),
    [
        (says("200 OK", "ok"), Answer("HTTP status 200", ok=True, again=False, body="ok")),
        (says("204 None"), Answer("HTTP status 204", ok=True, again=False)),
        (says("302 Found", more="Location: /other\r\n"), Answer("HTTP status 302", again=False)),
        (says("404 None", "\x1b[2Jno_service"), Answer("HTTP status 404", again=False, body="\\x1b[2Jno_service")),
        (says("429 Later"), Answer("HTTP status 429")),
        (says("500 Oops", "é"), Answer("HTTP status 500", body="é")),
        (huge, Answer("HTTP status 200", ok=True, again=False, body="x" * 1024)),
        (closed, Answer("RemoteProtocolError: Server disconnected without sending a response.")),
        (never, Answer("no answer within 0.2 seconds")),
    ],
    ids=["200", "204", "redirect", "404", "429", "500", "huge", "closed", "never"],
)
async def test_what_comes_back_is_bounded_and_said(
    answering: Answering, expected: Answer, settings: Settings, receiver: Receiver, monkeypatch: Any
) -> None:
    """Whatever a webhook does, one request is made, without a redirect; an answer's end is not waited for."""
    monkeypatch.setattr(sender, "SECONDS", 0.2 if answering is never else 3600.0)
    receiver.answers = [answering]
    assert await Target(settings).send(TEST) == expected
    assert [each.text for each in receiver.requests] == ["It says &lt;&amp;&gt;.\nhttp://127.0.0.1:8322/go/now"]
    assert not (answering is huge and receiver.requests[0].answered)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("tee {}", Answer("tee ended with status 0", ok=True)),
        ("false", Answer("false ended with status 1")),
        ("/none", Answer("[Errno 2] No such file or directory: '/none'")),
    ],
)
async def test_a_program_reads_a_line(command: str, expected: Answer, tmp_path: Path) -> None:
    """Of JSON, with the text as it is. One that fails is told apart."""
    url = "https://console.example/glovebox/"
    settings = Settings(
        state_dir=tmp_path / "state", notify=f"exec:{command.format(tmp_path / 'told')}", console_url=url
    )
    assert await Target(settings).send(TEST) == expected
    if expected.ok:
        page = f"{url}go/now"
        line = {"id": "i", "about": "test", "text": f"It says <&>.\n{page}", "page": page}
        assert (tmp_path / "told").read_text() == json.dumps(line) + "\n"


async def test_the_signature_is_checked_as_documented(settings: Settings, receiver: Receiver) -> None:
    """The page's function accepts what came, and neither another body, an old one, nor another key."""
    await Target(settings).send(TEST)
    (page,) = re.findall(
        r"```python\n(def is_genuine.*?)```", (ROOT / "docs/operate/monitor.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {"hmac": hmac, "time": time}
    exec(page, names)  # noqa: S102 - our own documentation
    genuine: Callable[[bytes, str, bytes], bool] = names["is_genuine"]
    path = settings.state_dir / "keys" / "notify.key"
    key, (request,) = path.read_bytes(), receiver.requests
    signature = request.headers["glovebox-signature"]
    assert genuine(key, signature, request.body)
    old = signature.replace("t=1", "t=0", 1)
    assert not any((genuine(key, signature, b"{}"), genuine(b"x" * 64, signature, request.body)))
    assert not genuine(key, old, request.body)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(SecretFileError, match="others have access"):
        Target(settings)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(SecretFileError, match="too short"):
        Target(settings)


@pytest.mark.parametrize(
    "address", ["http://example.com/", "http://127.0.0.1@example.com/", "ftp://x", "https://u:p@x/", "exec:'", "x"]
)
def test_only_an_address_by_tls_or_of_this_machine_is_taken(address: str) -> None:
    """The control are the addresses of the other tests, and Slack's."""
    with pytest.raises(ValueError, match="notify"):
        Settings(notify=address)
    assert Settings(notify="https://hooks.slack.com/services/T0/B0/x").notify


def test_what_is_told_of_records(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names show whole and link nothing; no argument, host or client; what nobody here can decide is left out."""
    whose = {"rule": "canary", "where": "stdout", "what": "canary", "principal": HOSTILE, "client": "canary"}
    write(
        settings, requested(1), requested(2, "client"), requested(3), requested(4), requested(5, "operator"),
        WatchAlarm(action="stop", call="c_1", tool="run_python", **whose), WatchAlarm(action="slow", **whose),
        stopped(HOSTILE, scope="principal", because="A `reason`."), stopped("", scope="all"),
        answered(3, "pending"), answered(4, "denied"), ApprovalWithdrawn(**question(5), by="x"),
    )  # fmt: skip
    with closing(audit_log(settings)) as log:  # a record of another version
        log.commit([Draft(kind="approval.requested", call_id=None, data={}, encoded=b"{}")])
    directory = settings.state_dir / "audit"
    found, end = news.look(directory, 0)
    records = [json.loads(line) for line in log_lines(directory)]
    ends = [sum(map(len, log_lines(directory)[: at + 1])) for at in range(len(records))]
    waits = f"a call of `run_python` by {SHOWN} waits for approval until T."
    assert [(*each[1:2], *each[3:]) for each in found] == [
        (kind, page, ends[at])
        for kind, page, at in (
            ("approval.requested", "waiting", 0), ("approval.requested", "waiting", 2),
            ("watch.alarm", "call/c_1", 5), ("watch.alarm", "call/", 6),
            ("stop.made", "now", 7), ("stop.made", "now", 8), ("approval.requested", "waiting", 12),
        )
    ]  # fmt: skip
    looks = "The watch rule `canary` found what it looks for in `stdout` of"
    assert [re.sub(r"until .*UTC", "until T", each.text) for each in found] == [
        f"a_1: {waits}", f"a_3: {waits}",
        f"{looks} `run_python` by {SHOWN}. Its action: stop.", f"{looks} `` by {SHOWN}. Its action: slow.",
        f"s_1: `local:0` stopped principal {SHOWN}: `A ⟪U+0060⟫reason⟪U+0060⟫.`",
        "s_1: `local:0` stopped everything: `B`",
        ": a call of `` by `` waits for approval until T.",
    ]  # fmt: skip
    assert [each.id for each in found] == [records[at]["hash"] for at in (0, 2, 5, 6, 7, 8, 12)]
    assert end == ends[-1]
    assert news.look(directory, found[-1].end or 0) == ([], end)
    with (directory / "audit.jsonl").open("ab") as log:
        log.write(log_lines(directory)[0][:-1])  # of a line that is being written
    assert news.look(directory, 0) == (found, end)
    assert news.look(directory, end + 1_000_000)[1] < end + 1_000_000
    monkeypatch.setattr(news, "MOST", 2)
    (summed, *rest), _ = news.look(directory, 0)
    text = "Not told at once, since T: 4 approval requests, 1 stop, 2 watch alarms."
    assert summed == News(f"{found[0].id}.{ends[7]}", "summary", summed.text, "history", ends[7])
    assert (re.sub(r"since .*UTC", "since T", summed.text), rest) == (text, found[-2:])
    monkeypatch.setattr(news, "FRESH", -news.FRESH)
    (summed,), _ = news.look(directory, ends[7])
    text = "Not told at once, since T: 1 approval request, 1 stop."
    assert (re.sub(r"since .*UTC", "since T", summed.text), summed.end) == (text, end)


@asynccontextmanager
async def followed(settings: Settings) -> AsyncIterator[AuditLog]:
    """Send what the log says, as a server does, and give its log."""
    async with AuditLog.open(settings.state_dir / "audit", "s_1") as log, anyio.create_task_group() as tasks:
        tasks.start_soon(sender.follow, settings, log, Target(settings))
        await until((settings.state_dir / "notify" / "position.json").exists)
        yield log
        tasks.cancel_scope.cancel()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and no verification."""
    monkeypatch.setattr(sender, "PAUSES", (0.0,) * 4)
    monkeypatch.setattr(sender, "LOOK_SECONDS", 0.01)

    async def verify(_self: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(sender._Sender, "_verify", verify)


@pytest.mark.usefixtures("quick")
async def test_what_fails_is_tried_five_times_recorded_and_left(settings: Settings, receiver: Receiver) -> None:
    """Each attempt has the same id; what comes after is sent; a lasting refusal is tried once."""
    down, gone = says("503 Down"), says("410 Gone")
    receiver.answers = [down] * 5 + [gone, down, says("200 OK")]
    async with followed(settings) as log:
        records = [await log.append(stopped(name)) for name in "abc"]
        await until(lambda: len(receiver.requests) == 8)
        await settled(settings)
    assert receiver.texts() == [told("a")] * 5 + [told("b")] + [told("c")] * 2
    ids = [each.headers["glovebox-id"] for each in receiver.requests]
    assert ids == [records[at].hash for at in (0, 0, 0, 0, 0, 1, 2, 2)]
    found = [each["data"] for each in map(json.loads, log_lines(settings.state_dir / "audit")) if "n.f" in each["kind"]]
    assert found == [
        {"id": records[0].hash, "about": "stop.made", "attempts": 5, "reason": "HTTP status 503"},
        {"id": records[1].hash, "about": "stop.made", "attempts": 1, "reason": "HTTP status 410"},
    ]


@pytest.mark.usefixtures("quick")
async def test_a_restart_sends_nothing_twice_and_what_came_meanwhile(settings: Settings, receiver: Receiver) -> None:
    """What was there before the first one is no news; attempts of a process that ended count."""
    write(settings, stopped("before"))
    async with followed(settings) as log:
        await log.append(stopped("a"))
        await until(lambda: len(receiver.requests) == 1)
        await settled(settings)
    write(settings, stopped("b"))
    receiver.answers = [never]
    for number in range(2, 7):
        async with followed(settings):
            await until(lambda: len(receiver.requests) == number)  # noqa: B023 - at once
    receiver.answers = [says("200 OK")]
    write(settings, stopped("c"))
    async with followed(settings):
        await until(lambda: len(receiver.requests) == 7)
    assert receiver.texts() == [told("a")] + [told("b")] * 5 + [told("c")]
    (failed,) = [each for each in map(json.loads, log_lines(settings.state_dir / "audit")) if "n.f" in each["kind"]]
    assert (failed["data"]["attempts"], failed["data"]["reason"]) == (5, "the server that tried last has ended")


@pytest.mark.usefixtures("quick")
async def test_what_goes_wrong_in_here_is_said_once_and_tried_again(
    settings: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """A position that is no JSON; once it is gone, what comes is sent."""
    position = settings.state_dir / "notify" / "position.json"
    async with followed(settings):
        pass
    position.write_text("{")
    async with followed(settings) as log:
        await until(lambda: "Notifications are not sent: JSONDecodeError" in caplog.text)
        await anyio.sleep(0.1)
        position.unlink()
        await until(position.exists)
        await log.append(stopped("a"))
        await until(lambda: receiver.texts() == [told("a")])
    assert caplog.text.count("Notifications are not sent") == 1


@pytest.mark.long
async def test_a_log_that_does_not_verify_is_told_once(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever process finds it; another problem is told too; while it verifies, nothing is."""
    for name in ("CHECK_SECONDS", "CHECK_SHARE", "LOOK_SECONDS"):
        monkeypatch.setattr(sender, name, 0.01)
    checked, run = [0], anyio.run_process

    async def counting(*arguments: Any, **options: Any) -> Any:
        done = await run(*arguments, **options)
        checked[0] += 1
        return done

    monkeypatch.setattr(anyio, "run_process", counting)

    async def checks() -> None:
        wanted = checked[0] + 2
        await until(lambda: checked[0] >= wanted, SECONDS)

    write(settings, *(stopped(str(number)) for number in range(3)))
    async with followed(settings):
        await checks()
        assert receiver.requests == []
        lines = log_lines(settings.state_dir / "audit")
        replace_lines(settings.state_dir / "audit", [lines[0], lines[1].replace(b"local:0", b"local:1"), *lines[2:]])
        await until(lambda: len(receiver.requests) == 1, SECONDS)
        await settled(settings, problem="audit.jsonl, line 2, edited")
        await checks()
    async with followed(settings):
        await checks()
    said = "The audit log does not verify: audit.jsonl, line 2, edited."
    assert receiver.texts() == [f"{said} Keep it as evidence, and run `glovebox audit verify`."]
    assert receiver.requests[0].text.endswith("/go/health")


def test_a_test_says_exactly_what_came_back(settings: Settings, receiver: Receiver, monkeypatch: Any) -> None:
    """To a person and to a program; without an address it says what to set."""
    receiver.answers = [says("200 OK", "ok"), says("500 Oops", "down")]

    def command(*words: str) -> tuple[int, str]:
        ended = CliRunner().invoke(main, ["notify", "test", *words, "--state-dir", str(settings.state_dir)])
        return ended.exit_code, ended.output

    code, said = command()
    assert (code, "Set GLOVEBOX_NOTIFY first" in said) == (USAGE, True)
    monkeypatch.setenv("GLOVEBOX_NOTIFY", receiver.url)
    assert command() == (OK, "Sent: HTTP status 200.\nok\n")
    code, said = command("--json")
    assert (code, json.loads(said)) == (FAILED, {"sent": False, "answer": "HTTP status 500", "body": "down"})
    assert receiver.texts() == ["This is a test."] * 2


CANARY = "canary9f3e"
"""In the program, its output and the name of its file."""


@pytest.mark.driver("bubblewrap")
@pytest.mark.usefixtures("runtime_dir")
async def test_nothing_of_a_program_is_sent_and_no_call_waits(
    options: list[str], receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls ask, run and are stopped while a webhook does not answer; the next server sends what is left to say."""
    monkeypatch.setenv("GLOVEBOX_NOTIFY", receiver.url)
    monkeypatch.setattr(sender, "SECONDS", 3600.0)
    receiver.answers = [never]
    code = f"print('{CANARY}'); open('/output/{CANARY}.txt', 'w').write('{CANARY}')"

    async def operate(*words: str) -> None:
        run = CliRunner().invoke
        assert (await anyio.to_thread.run_sync(lambda: run(main, [*words, *options[-2:]]))).exit_code == OK

    async with whole_server(options, "stdio") as server, server.client("stdio", "modern") as client:

        async def call() -> dict[str, Any]:
            return (await client.call_tool("run_python", {"code": code})).structured_content or {}

        assert (await call())["refused"]["rule"] == "approval.pending"
        await until(lambda: len(receiver.requests) == 1)
        await operate("approvals", "allow", receiver.requests[0].text[:28])
        assert (await call())["stdout"]["text"] == f"{CANARY}\n"
        await operate("stop", "--tool", "run_python", "--because", "Enough.")
        assert (await call())["refused"]["rule"] == "stop"
        assert [each.answered for each in receiver.requests] == [False]
    receiver.answers = [says("200 OK")]
    async with whole_server(options, "stdio"):
        await until(lambda: len(receiver.requests) == 2)
    asked, stop = receiver.texts()
    assert re.fullmatch(
        r"a_\w{26}: a call of `run_python` by `local:\d+` waits for approval until [-0-9: ]+ UTC\.", asked
    )
    assert re.fullmatch(r"s_\w{26}: `local:\d+` stopped tool `run_python`: `Enough\.`", stop)
    assert CANARY.encode() not in b"".join(each.raw for each in receiver.requests)
    kept = [*(tmp_path / "state" / "artifacts").rglob("*"), *(tmp_path / "state" / "governance").rglob("*")]
    assert CANARY.encode() in b"".join(path.read_bytes() for path in kept if path.is_file())


@pytest.mark.long
async def test_of_two_servers_one_sends_and_when_it_is_killed_the_other(
    options: list[str], settings: Settings, receiver: Receiver
) -> None:
    """Whoever it is. Each is delivered once, what was under way with its id, what came without a server by the next."""
    environment = {**os.environ, "GLOVEBOX_NOTIFY": receiver.url}
    command = [sys.executable, "-I", "-m", "glovebox_server", "serve", *options]
    running: list[Popen[bytes]] = []

    async def start() -> None:
        live = len(writers.live(settings.state_dir / "audit"))
        with (settings.state_dir.parent / "log").open("ab") as log:
            running.append(Popen(command, stdin=PIPE, stdout=log, stderr=log, env=environment))  # noqa: ASYNC220 - quick
        await until(lambda: len(writers.live(settings.state_dir / "audit")) > live, SECONDS)

    async def received(count: int) -> Request:
        await until(lambda: len(receiver.requests) == count, SECONDS)
        return receiver.requests[-1]

    try:
        await start()
        await start()
        await until((settings.state_dir / "notify" / "position.json").exists, SECONDS)
        write(settings, stopped("a"))
        await received(1)
        receiver.answers = [never]
        write(settings, stopped("b"))
        port = (await received(2)).port
        (holder,) = [
            each for each in running for made in psutil.Process(each.pid).net_connections() if made.laddr.port == port
        ]
        receiver.answers = [says("200 OK")]
        holder.send_signal(signal.SIGKILL)
        await received(3)
        write(settings, stopped("c"))
        await received(4)
        await settled(settings)
        for each in running:
            each.communicate()  # its client leaves
        write(settings, stopped("d"))
        await start()
        await received(5)
        assert [each.wait() for each in running[:2] if each is not holder] == [0]
    finally:
        for each in running:
            each.kill()
            each.communicate()
    found = [
        (each.headers["glovebox-id"], text) for each, text in zip(receiver.requests, receiver.texts(), strict=True)
    ]
    assert [text for _, text in found] == [told("a"), told("b"), told("b"), told("c"), told("d")]
    assert found[1] == found[2]
    assert [each.answered for each in receiver.requests] == [True, False, True, True, True]
