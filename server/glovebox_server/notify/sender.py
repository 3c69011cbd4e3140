"""Follows the audit log, and sends what its records say: one process of a state directory at a time.

Rule 1  The sender holds the lock on ``STATE/notify``, which the kernel releases however its process ends. The next one
        continues where it was: that is written before and after each attempt.
Rule 2  What was delivered is not sent again. An attempt that ended with its process counts, and the next one has the
        same id.
Rule 3  The log is the queue: ``news.MOST`` is held in memory. No call waits for any of this.
"""

import hmac
import html
import json
import logging
import secrets
import shlex
import sys
import time
from contextlib import suppress
from functools import partial
from hashlib import sha256
from subprocess import DEVNULL  # noqa: TID251 - of the standard library's names for no output
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import anyio
import anyio.to_thread
import httpx2
from anyio.abc import Process

from glovebox_audit.events import NotificationFailed
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.printable import printable
from glovebox_audit.segments import anchors
from glovebox_server import secret_files
from glovebox_server.errors import without_paths
from glovebox_server.notify.news import News, look
from glovebox_server.requests import KEYS
from glovebox_server.requests import NOTIFY_KEY as KEY
from glovebox_server.secret_files import SecretDirectory, SecretFileError
from glovebox_server.settings import Settings

PAUSES: Final = (1.0, 5.0, 25.0, 125.0)
"""Seconds before the second attempt and each later one."""
SECONDS, ANSWER_BYTES = 10.0, 1024
"""For a webhook's whole answer; and of its body, which is only shown. A program has ``anchors.PROGRAM_SECONDS``."""
LOOK_SECONDS, CHECK_SECONDS, CHECK_SHARE, _DAY = 0.5, 300.0, 200.0, 86_400.0
"""Between two looks at the log and at the lock; and between verifications, which are to take little of the time."""
_STATE, _LEAST, _MOST = "position.json", 16, 4096
_LATER: Final = (408, 425, 429)
_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """The outcome of one attempt, and whether another may succeed."""

    words: str
    ok: bool = False
    again: bool = True
    body: str = ""


class Target:
    """A webhook or a program. An address may be a secret, as Slack's are: nothing quotes it."""

    def __init__(self, settings: Settings) -> None:
        """Read the key, a text, which is made if missing. Raises SecretFileError if it cannot be used."""
        self._url, self._console = settings.notify or "", settings.console_url.rstrip("/")
        kind, _, words = self._url.partition(":")
        self._command, self._left = shlex.split(words) if kind == "exec" else [], list[Process]()
        with secret_files.opened(settings.state_dir / KEYS, KEY) as place:
            if KEY not in place.names():
                place.make(KEY, secrets.token_hex(32).encode())
            self._key = place.read(KEY, _MOST).strip()
        if len(self._key) < _LEAST:
            raise SecretFileError(KEY, settings.state_dir / KEYS / KEY, "it is too short", "Remove it: one is made.")
        # Once, as reading the trust store takes a while. What stays on this machine needs none, and passes no proxy.
        self._tls = httpx2.create_ssl_context() if kind == "https" else False

    async def send(self, told: News) -> Answer:
        """Send one notification; raises nothing but cancellation."""
        page = f"{self._console}/go/{quote(told.page)}"
        text = f"{told.text}\n{page}"
        if not self._command:
            return await self._post(told, json.dumps({"text": html.escape(text, quote=False)}).encode())
        body = json.dumps({"id": told.id, "about": told.about, "text": text, "page": page})
        try:
            await anchors.give(self._command, f"{body}\n".encode(), self._left)
        except OSError as problem:
            return Answer(str(problem))
        return Answer(f"{self._command[0]} ended with status 0", ok=True)

    async def _post(self, told: News, body: bytes) -> Answer:
        stamp = str(int(time.time()))
        signature = hmac.digest(self._key, f"{stamp}.".encode() + body, "sha256").hex()
        headers = {
            "Content-Type": "application/json", "Accept-Encoding": "identity", "Glovebox-About": told.about,
            "Glovebox-Id": told.id, "Glovebox-Signature": f"t={stamp},v1={signature}",
        }  # fmt: skip
        status, content, problem = 0, b"", f"no answer within {SECONDS:g} seconds"
        http = httpx2.AsyncClient(verify=self._tls, timeout=None, trust_env=bool(self._tls))
        try:
            with anyio.move_on_after(SECONDS):
                async with http, http.stream("POST", self._url, content=body, headers=headers) as answer:
                    status = answer.status_code
                    async for piece in answer.aiter_raw():
                        content += piece
                        if len(content) >= ANSWER_BYTES:
                            break
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            problem = printable(f"{type(error).__name__}: {error}"[:200])
        if not status:
            return Answer(problem)
        again = status in _LATER or httpx2.codes.is_server_error(status)
        shown = printable(content[:ANSWER_BYTES].decode("utf-8", "replace"))
        return Answer(f"HTTP status {status}", httpx2.codes.is_success(status), again, shown)


async def follow(settings: Settings, audit: AuditLog, target: Target) -> None:
    """Send what is new, whenever no other process of the state directory does, until cancelled."""
    told = ""
    while True:
        try:
            with secret_files.opened(settings.state_dir / "notify", "position of notifications") as place:
                if place.take():
                    await _Sender(settings, audit, target, place).run()
        except Exception as problem:  # noqa: BLE001 - whatever it is, calls go on
            first = problem.exceptions[0] if isinstance(problem, ExceptionGroup) else problem
            if (words := f"{type(first).__name__}: {first}") != told:
                _log.warning("Notifications are not sent: %s", words)
            told = words
        await anyio.sleep(LOOK_SECONDS)


class _Sender:
    def __init__(self, settings: Settings, audit: AuditLog, target: Target, place: SecretDirectory) -> None:
        self._state_dir, self._audit, self._target, self._place = settings.state_dir, audit, target, place
        self._verdict: str | None = None
        # Offset in the log; attempts to send what comes next; time of the next verification, and its last problem.
        self._state: dict[str, Any] = {"at": audit.head.size, "tries": 0, "due": 0.0, "problem": ""}

    async def run(self) -> None:
        """Send until cancelled."""
        if _STATE in self._place.names():
            self._state = json.loads(self._place.read(_STATE, _MOST))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._verify)
            await self._save()
            while True:
                with suppress(OSError, AuditError):  # while the log rotates; what lasts is found by ``_verify``
                    await self._send_new()
                if self._verdict is not None:
                    (problem, self._verdict), text = (self._verdict, None), "The audit log does not verify: "
                    if problem and problem != self._state["problem"]:
                        text += f"{problem}. Keep it as evidence, and run `glovebox audit verify`."
                        await self._tell(News(sha256(text.encode()).hexdigest(), "chain", text, "health"))
                    self._state["problem"] = problem
                    await self._save()
                await anyio.sleep(LOOK_SECONDS)

    async def _send_new(self) -> None:
        found, end = await anyio.to_thread.run_sync(look, self._state_dir / "audit", self._state["at"])
        for told in found:
            await self._tell(told)
        self._state["at"] = end

    async def _tell(self, told: News) -> None:
        """Send one, or give it up after the last attempt, which is recorded."""
        answer, state = Answer("the server that tried last has ended"), self._state
        while not answer.ok and answer.again and state["tries"] <= len(PAUSES):
            await anyio.sleep(PAUSES[state["tries"] - 1] if state["tries"] else 0)
            state["tries"] += 1
            await self._save()
            answer = await self._target.send(told)
        if not answer.ok:
            words, tries = without_paths(answer.words), state["tries"]
            _log.warning("A notification (%s) is given up after attempt %d: %s", told.about, tries, words)
            with suppress(AuditError):
                await self._audit.append(NotificationFailed(id=told.id, about=told.about, attempts=tries, reason=words))
        state |= {"at": state["at"] if told.end is None else told.end, "tries": 0}
        await self._save()

    async def _save(self) -> None:
        content = json.dumps(self._state).encode()
        await anyio.to_thread.run_sync(partial(self._place.make, _STATE, content, replace=True))

    async def _verify(self) -> None:
        """Verify the log now and then, in a process that gives way to all others."""
        words = ("-I", "-m", "glovebox_server", "audit", "verify", "--json", "--state-dir")
        command = ["nice", "-n", "19", sys.executable, *words, str(self._state_dir)]
        while True:
            await anyio.sleep(max(LOOK_SECONDS, min(self._state["due"] - time.time(), _DAY)))
            began = time.monotonic()
            try:
                report = json.loads((await anyio.run_process(command, check=False, stderr=DEVNULL)).stdout)
                found = [f"{each['file']}, line {each['line']}, {each['kind']}" for each in report.get("problems", ())]
                self._verdict = found[0] if found else without_paths((report.get("error") or {}).get("message", ""))
            except (OSError, ValueError) as problem:
                _log.warning("The audit log was not verified: %s", problem)
            self._state["due"] = time.time() + max(CHECK_SECONDS, CHECK_SHARE * (time.monotonic() - began))
