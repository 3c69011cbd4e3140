"""Forty ways to stretch a yes over the wire: by the state that a client carries, and by the yes that the server keeps.

``tests/unit/test_approvals.py`` stretches what a yes is bound to; here real clients do, of servers that share a state.
"""

import contextlib
import re
import subprocess  # noqa: TID251 - servers are processes of their own
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from tests.fixtures.callers import give_token
from tests.interaction.served import until
from tests.interaction.test_asking import kinds, operate, options
from tests.interaction.test_real_server import GLOVEBOX

from glovebox_server.mcp.server import RUN_META_KEY, STATE_RULE

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir"), pytest.mark.timeout(300)]

ASKED = "asked anew"
AGAIN = "the same question again"
PENDING = "approval.pending"

YES = {"approval": types.ElicitResult(action="accept", content={"answer": "allow"})}
NO = {"approval": types.ElicitResult(action="decline")}

POLICY = """\
version = 1
default = "all"
[roles.all]
tools = ["run_python"]
[[example]]
principal = "token:alice"
call = { tool = "run_python", arguments = { code = "1" } }
expect = "ask"
rule = "approval.ask"
"""


def said(content: dict[str, Any] | None, action: Any = "accept", key: str = "approval") -> types.InputResponses:
    """An answer that is none, or to something else."""
    return {key: types.ElicitResult(action=action, content=content)}


def _same(text: str) -> str:
    return text


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One attempt: everything is as it was asked, but for what is said here."""

    carrying: str | None
    """What becomes of it with the state and a yes; None where it is not tried."""
    without: str | None
    """What becomes of it without them, after an operator's yes to the question."""
    server: str = "same"
    token: str = "alice"  # noqa: S105 - a name
    client: str = "editor"
    transport: str = "http"
    legacy: bool = False
    program: Callable[[str], str] = _same
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tool: str = "run_python"
    run: Callable[[str], str] | None = None
    """Handle of the run it names, made of another run's."""
    state: Callable[[str], str | None] = _same
    responses: types.InputResponses = field(default_factory=lambda: dict(YES))


def _program(change: Callable[[str], str]) -> Stretch:
    return Stretch(carrying=STATE_RULE, without=ASKED, program=change)


def _answer(responses: types.InputResponses) -> Stretch:
    return Stretch(carrying=PENDING, without=None, responses=responses)


def _state(change: Callable[[str], str | None], expected: str = STATE_RULE) -> Stretch:
    return Stretch(carrying=expected, without=None, state=change)


STRETCHES: dict[str, Stretch] = {
    "a blank after the program": _program(lambda code: code + " "),
    "a line after the program": _program(lambda code: code + "\n"),
    "a carriage return": _program(lambda code: code + "\r"),
    "a statement more": _program(lambda code: code + ";import os"),
    "what nobody sees": _program(lambda code: code + "\u200b"),
    "what is drawn backwards": _program(lambda code: code + "#\u202e"),
    "a letter that looks the same": _program(lambda code: code.replace("p", "\u0440")),
    "another program": _program(lambda _: "print(43)"),
    "an argument more": Stretch(carrying=STATE_RULE, without=ASKED, arguments={"timeout_seconds": 1}),
    "another tool": Stretch(carrying=STATE_RULE, without=None, tool="read_workspace_file"),
    "another principal": Stretch(carrying=STATE_RULE, without=ASKED, token="bob"),  # noqa: S106 - a name
    "a principal of another client": Stretch(carrying=STATE_RULE, without=ASKED, token="bob", client="x"),  # noqa: S106 - a name
    "the run of another client": Stretch(carrying=ASKED, without=ASKED, client="another"),
    "a run that is named": Stretch(carrying=ASKED, without=ASKED, run=_same),
    "a run that is forged": Stretch(carrying="run.handle", without="run.handle", run=lambda run: "r_" + run[:1:-1]),
    "a session of the era before": Stretch(carrying=PENDING, without=PENDING, legacy=True),
    "an SSE session": Stretch(carrying=PENDING, without=PENDING, legacy=True, transport="sse"),
    "another profile": Stretch(carrying=ASKED, without=ASKED, server="profile"),
    "another workspace": Stretch(carrying=ASKED, without=ASKED, server="workspace"),
    "a policy": Stretch(carrying=ASKED, without=ASKED, server="policy"),
    "no state": _state(lambda _: None, AGAIN),
    "a state cut short": _state(lambda state: state[:-1]),
    "a state with more": _state(lambda state: state + "A"),
    "a state of another version": _state(lambda state: "v2" + state[2:]),
    "the question's id for a state": _state(lambda _: "a_" + "0" * 26),
    "no answer": _answer({}),
    "an answer to something else": _answer(said({"answer": "allow"}, key="other")),
    "an answer without a word": _answer(said(None)),
    "an answer in another field": _answer(said({"approved": "allow"})),
    "a word that is near": _answer(said({"answer": "Allow"})),
    "a truth for a word": _answer(said({"answer": True})),
    "a yes for the run where one for the call was asked": _answer(said({"answer": "allow for this run"})),
    "a yes that was put away": _answer(said({"answer": "allow"}, action="cancel")),
}


def test_there_are_forty_attempts() -> None:
    """As many as are promised: each with the state, and each that says something without it."""
    tried = [each for stretch in STRETCHES.values() for each in (stretch.carrying, stretch.without) if each]
    assert len(tried) >= 40


@dataclass(kw_only=True)
class Servers:
    """Servers that share a state directory, each on something else."""

    urls: Mapping[str, str]
    tokens: Mapping[str, str]

    @asynccontextmanager
    async def client(self, of: Stretch) -> AsyncIterator[Client]:
        """Whoever makes the attempt."""
        url, headers = self.urls[of.server], {"Authorization": f"Bearer {self.tokens[of.token]}"}
        able: dict[str, Any] = {} if of.legacy else {"elicitation_callback": _never}
        me = types.Implementation(name=of.client, version="1")
        mode = "legacy" if of.legacy else "auto"
        async with httpx2.AsyncClient(headers=headers, timeout=60, verify=False) as http:
            wire = sse_client(f"{url}/sse", headers=headers)
            wire = wire if of.transport == "sse" else streamable_http_client(f"{url}/mcp", http_client=http)
            async with Client(wire, mode=mode, client_info=me, **able) as client:
                yield client

    async def attempt(self, of: Stretch, code: str, other_run: str, legitimate: Any, *, carrying: bool) -> str:
        """What becomes of one attempt; a question of its own that it leads to is answered with no."""
        state = of.state(legitimate.request_state) if carrying else None
        arguments = {"code": of.program(code), **of.arguments} if of.tool == "run_python" else {"path": "a.txt"}
        named: Any = {"meta": {RUN_META_KEY: of.run(other_run)}} if of.run else {}
        answer: dict[str, Any] = {"input_responses": of.responses, "request_state": state} if state is not None else {}
        async with self.client(of) as client:
            try:
                came = await _call(client, of.tool, arguments, **answer, **named)
            except MCPError as refused:
                return str((refused.error.data or {}).get("rule"))
            if not isinstance(came, types.InputRequiredResult):
                return _rule(came)
            if _identifier(came) == _identifier(legitimate):
                return AGAIN
            denied = await _call(
                client, of.tool, arguments, input_responses=NO, request_state=came.request_state, **named
            )
            assert _rule(denied) == "approval.denied"
            return ASKED


async def _never(_context: Any, _params: types.ElicitRequestParams) -> types.ElicitResult:
    raise AssertionError  # the test drives the rounds itself


async def _call(client: Client, tool: str, arguments: dict[str, Any], **more: Any) -> Any:
    return await client.session.call_tool(tool, arguments, allow_input_required=True, **more)


def _rule(came: Any) -> str:
    assert isinstance(came, types.CallToolResult)
    structured = came.structured_content or {}
    refused = structured.get("refused")
    return "ran" if refused is None else str(refused["rule"])


@contextmanager
def serving(options: list[str], directory: Path) -> Iterator[Servers]:
    """Start them, all at once."""
    profiles, state = Path(options[3]), directory / "state"
    tokens = {name: give_token(state, name) for name in ("alice", "bob")}
    (directory / "narrower").mkdir(mode=0o755)
    text = (profiles / "run_python.toml").read_text()
    changed = re.sub(r"(?m)^wall_seconds = .*$", "wall_seconds = 9", text)
    assert changed != text
    (directory / "narrower" / "run_python.toml").write_text(changed)
    (directory / "elsewhere").mkdir()
    (directory / "another.toml").write_text(POLICY)
    own = {
        "same": options,
        "profile": [*options, "--profiles-dir", str(directory / "narrower")],
        "workspace": [*options, "--workspace", str(directory / "elsewhere")],
        "policy": [*options, "--policy", str(directory / "another.toml")],
    }
    with ExitStack() as running:
        for name, words in own.items():
            sink = running.enter_context((directory / f"{name}.log").open("wb"))
            command = [GLOVEBOX, "serve", "--transport", "http", "--port", "0", *words]
            process = running.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=sink))
            running.callback(process.terminate)
        portal = running.enter_context(anyio.from_thread.start_blocking_portal())
        urls = {}
        for name in own:
            log = directory / f"{name}.log"
            with contextlib.suppress(TimeoutError):
                portal.call(until, lambda log=log: b"url=" in log.read_bytes(), 90.0)
            found = re.search(r"url=(\S+)", log.read_text())
            assert found is not None, log.read_text()
            urls[name] = found[1]
        yield Servers(urls=urls, tokens=tokens)


@pytest.mark.parametrize("carrying", [True, False], ids=["with a state", "after an operator's yes"])
async def test_no_yes_is_stretched_and_none_is_used_up_by_trying(
    carrying: bool, options: list[str], tmp_path: Path
) -> None:
    """Each attempt ends as its line says, and nothing runs; the control is the legitimate call after all of them."""
    legitimate, code = Stretch(carrying=None, without=None), "print(6 * 7)"
    with serving(options, tmp_path) as servers:
        async with servers.client(legitimate) as client:
            other = await _other_run(servers)
            asked = await _call(client, "run_python", {"code": code})
            answer: dict[str, Any] = {"input_responses": YES, "request_state": asked.request_state} if carrying else {}
            if not carrying:
                operate(["approvals", "allow", _identifier(asked)], options)
            wanted = {name: each.carrying if carrying else each.without for name, each in STRETCHES.items()}
            found = {
                name: await servers.attempt(STRETCHES[name], code, other, asked, carrying=carrying)
                for name, end in wanted.items()
                if end
            }
            assert found == {name: end for name, end in wanted.items() if end}
            assert kinds(tmp_path).count("call.finished") == 1
            assert _rule(await _call(client, "run_python", {"code": code}, **answer)) == "ran"
            again = await _call(client, "run_python", {"code": code})
            assert isinstance(again, types.InputRequiredResult)
    assert kinds(tmp_path).count("call.finished") == 2


async def _other_run(servers: Servers) -> str:
    """Handle of a run that the same principal has with another client, which somebody says yes to there."""
    async with servers.client(Stretch(carrying=None, without=None, client="elsewhere")) as client:
        asked = await _call(client, "run_python", {"code": "1"})
        ran = await _call(client, "run_python", {"code": "1"}, input_responses=YES, request_state=asked.request_state)
        handle: str = ran.meta[RUN_META_KEY]
        return handle


def _identifier(asked: types.InputRequiredResult) -> str:
    """Of the question, as the person reads it."""
    (request,) = (asked.input_requests or {}).values()
    found = re.search(r"Question (a_[0-9a-z]{26})", request.params.message)  # type: ignore[union-attr]  # it asks
    assert found is not None
    return found[1]
