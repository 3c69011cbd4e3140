"""People at real clients of a real server are asked before a program runs, in every transport and era."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from click.testing import CliRunner
from mcp import Client
from mcp.shared.exceptions import MCPError
from tests.fixtures.audit_logs import log_lines
from tests.interaction.served import PAIRS, Era, Transport, connected, plain_profile

from glovebox_server.cli.main import main
from glovebox_server.mcp.server import STATE_RULE

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

CODE = "print(6 * 7)"


@dataclass
class Person:
    """Somebody at a client, who says what they were told to and remembers what they were asked."""

    says: str | None
    asked: list[str] = field(default_factory=list)

    async def answer(self, _context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        """What the client's form would send."""
        self.asked.append(params.message)
        if self.says is None:
            return types.ElicitResult(action="decline")
        return types.ElicitResult(action="accept", content={"answer": self.says})


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A server whose programs have to be approved one by one."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles").chmod(0o755)
    (tmp_path / "profiles" / "run_python.toml").write_text(plain_profile(approval='"ask"'))
    tmp_path.chmod(0o755)
    return ["--workspace", str(tmp_path / "workspace"), "--profiles-dir", str(tmp_path / "profiles"),
            "--state-dir", str(tmp_path / "state")]  # fmt: skip


def kinds(directory: Path) -> list[str]:
    """Kinds of the records of calls, in order."""
    kept = ("approval.", "call.")
    found: list[str] = [json.loads(line)["kind"] for line in log_lines(directory / "state" / "audit")]
    return [kind for kind in found if kind.startswith(kept)]


def refusals(directory: Path) -> Counter[tuple[str, str]]:
    """Requests that were refused before they became calls, by caller and rule; the last are written at the end."""
    found: Counter[tuple[str, str]] = Counter()
    for record in map(json.loads, log_lines(directory / "state" / "audit")):
        for row in record["data"]["refused"] if record["kind"] == "requests.refused" else ():
            found[row["principal"], row["rule"]] += row["count"]
    return found


@pytest.mark.parametrize(("transport", "era"), PAIRS)
async def test_a_person_at_the_client_says_yes_or_no(
    transport: Transport, era: Era, options: list[str], tmp_path: Path
) -> None:
    """What they are shown is the program; a yes runs it once, a no does not. Who forges no answer gets none."""
    person = Person("allow")
    async with connected(transport, era, options, elicitation_callback=person.answer) as client:
        allowed = await client.call_tool("run_python", {"code": CODE})
        assert (allowed.structured_content or {})["stdout"]["text"] == "42\n"
        (question,) = person.asked
        assert f"  1 │ {CODE}" in question
        person.says = None
        denied = await client.call_tool("run_python", {"code": CODE})
        assert denied.is_error
        assert (denied.structured_content or {})["refused"]["rule"] == "approval.denied"
        assert len(person.asked) == 2
    assert kinds(tmp_path) == [
        "approval.requested", "approval.answered", "call.decided", "call.finished",
        "approval.requested", "approval.answered", "call.decided",
    ]  # fmt: skip


@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy"), ("http", "modern")])
async def test_who_cannot_be_asked_is_told_to_try_again_and_finds_the_yes(
    transport: Transport, era: Era, options: list[str], tmp_path: Path
) -> None:
    """The operator answers on another terminal; the same call runs then, once, and another one does not."""
    async with connected(transport, era, options) as client:
        refused = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
        assert refused["refused"]["rule"] == "approval.pending"
        (identifier,) = [word for word in refused["refused"]["reason"].split() if word.startswith("a_")]
        operate(["approvals", "allow", identifier], options)
        other = (await client.call_tool("run_python", {"code": CODE + " "})).structured_content or {}
        assert other["refused"]["rule"] == "approval.pending"
        ran = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
        assert ran["stdout"]["text"] == "42\n"
        again = (await client.call_tool("run_python", {"code": CODE})).structured_content or {}
        assert again["refused"]["rule"] == "approval.pending"


async def test_a_state_answers_for_its_caller_tool_and_arguments_alone(options: list[str], tmp_path: Path) -> None:
    """Forged, changed, and carried to another program: refused, and the person's own answer still counts."""
    yes: Any = {"approval": types.ElicitResult(action="accept", content={"answer": "allow"})}

    async def never(_context: Any, _params: types.ElicitRequestParams) -> types.ElicitResult:
        raise AssertionError  # the test drives the rounds itself

    async with connected("http", "modern", options, elicitation_callback=never) as client:
        first = await ask(client, CODE)
        assert isinstance(first, types.InputRequiredResult)
        state = first.request_state or ""
        for forged in ("", "a_1", state[:-2], state[::-1], state + "A", "v1." + "A" * 100):
            with pytest.raises(MCPError, match="requestState") as refused:
                await ask(client, CODE, input_responses=yes, request_state=forged or "x")
            assert refused.value.error.data["rule"] == STATE_RULE
        with pytest.raises(MCPError, match="requestState"):
            await ask(client, CODE + "\n", input_responses=yes, request_state=state)
        # An answer without the state it belongs to is none: the question is put again.
        assert isinstance(await ask(client, CODE, input_responses=yes), types.InputRequiredResult)
        ran = await ask(client, CODE, input_responses=yes, request_state=state)
        assert isinstance(ran, types.CallToolResult)
        assert not ran.is_error
        # Used up: the same answer to the same question starts nothing a second time.
        again = await ask(client, CODE, input_responses=yes, request_state=state)
        assert isinstance(again, types.InputRequiredResult)
    assert kinds(tmp_path).count("call.finished") == 1
    assert refusals(tmp_path) == {("token:default", STATE_RULE): 7}


async def ask(client: Client, code: str, **answer: Any) -> types.CallToolResult | types.InputRequiredResult:
    """One round of a call, as a client makes it."""
    came: types.CallToolResult | types.InputRequiredResult = await client.session.call_tool(
        "run_python", {"code": code}, allow_input_required=True, **answer
    )
    return came


def operate(command: Sequence[str], options: list[str]) -> str:
    """Run a command of the operator's, on the server's state."""
    state = options[options.index("--state-dir") :][:2]
    done = CliRunner().invoke(main, [*command, *state])
    assert done.exit_code == 0, done.output
    return done.stdout
