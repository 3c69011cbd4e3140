"""Ways to stretch a yes that only raw bytes, or two clients of one caller, can try."""

import json
import re
import subprocess  # noqa: TID251 - raw lines go to a whole server process
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp_types import Implementation
from tests.interaction.served import Served, whole_server
from tests.interaction.test_asking import CODE, kinds, operate, options
from tests.interaction.test_real_server import GLOVEBOX

from glovebox_server.mcp.server import RUN_META_KEY

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

SHOWN = '{"code":"print(\'\u00e9\')","timeout_seconds":1}'
EVIL = '"code":"print(6 * 7)"'
NO_JSON = "-32700"
"""Nobody guesses which of two values was meant, nor what half a character is."""

ATTEMPTS = {
    "a key twice, the other program last": (f"{SHOWN[:-1]},{EVIL}}}", NO_JSON),
    "a key twice, the other program first": (f"{{{EVIL},{SHOWN[1:]}", NO_JSON),
    "a key spelled with an escape": (SHOWN[:-1] + ',"\\u0063ode":"print(6 * 7)"}', NO_JSON),
    "a truth for a number": (SHOWN.replace(":1}", ":true}"), "arguments"),
    "text for a number": (SHOWN.replace(":1}", ':"1"}'), "arguments"),
    "a little more": (SHOWN.replace(":1}", ":1.0000000000000002}"), "asked anew"),
    "another unicode form": (SHOWN.replace("\u00e9", "e\u0301"), "asked anew"),
    "half a character": (SHOWN.replace("\u00e9", "\\ud800"), NO_JSON),
    "a key in another case": (SHOWN[:-1] + ',"Code":"print(6 * 7)"}', "arguments"),
}
"""Arguments as bytes; what becomes of them after a yes to ``SHOWN``."""

SAME = '{"timeout_seconds":1.0,"\\u0063ode":"\\u0070rint(\'\\u00e9\')","inputs":[]}'
"""The call that was shown, in other bytes."""


class Raw:
    """A server, and a client that writes each byte itself."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._number = 0

    def ask(self, method: str, params: str) -> Any:
        """One request; its result."""
        self._number += 1
        line = f'{{"jsonrpc":"2.0","id":{self._number},"method":"{method}","params":{params}}}\n'
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        while True:
            answer = json.loads(self._process.stdout.readline())
            if answer.get("id") in (self._number, None) and "method" not in answer:
                return answer.get("result", answer)

    def call(self, arguments: str) -> Any:
        """Rule and reason of a refusal, or what was printed."""
        result = self.ask("tools/call", f'{{"name":"run_python","arguments":{arguments}}}')
        if "error" in result:
            return {"rule": str(result["error"]["code"]), "reason": result["error"]["message"]}
        said = result["structuredContent"]
        return said.get("refused") or said["stdout"]["text"]


@pytest.fixture
def raw(options: list[str]) -> Iterator[Raw]:
    """A session of the era before."""
    command = [GLOVEBOX, "serve", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        client = Raw(process)
        info = '{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"raw","version":"1"}}'
        client.ask("initialize", info)
        yield client
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)


def _identifier(refused: Any) -> str:
    assert refused["rule"] == "approval.pending", refused
    found = re.search(r"a_[0-9a-z]{26}", refused["reason"])
    assert found is not None
    return found[0]


def test_no_spelling_of_the_arguments_stretches_a_yes(raw: Raw, options: list[str], tmp_path: Path) -> None:
    """What runs is what was shown, or nothing; the control, the same call in other bytes, passes once after all."""
    asked = _identifier(raw.call(SHOWN))
    for name, (arguments, expected) in ATTEMPTS.items():
        found = raw.call(arguments)
        if expected == "asked anew":
            assert _identifier(found) != asked, name
        else:
            assert found["rule"] == expected, name
    operate(["approvals", "allow", asked], options)
    for name, (arguments, expected) in ATTEMPTS.items():
        found = raw.call(arguments)
        assert found["rule"] == expected if expected != "asked anew" else _identifier(found) != asked, name
    assert kinds(tmp_path).count("call.finished") == 0
    assert raw.call(SAME) == "\u00e9\n"
    assert _identifier(raw.call(SHOWN)) != asked
    assert kinds(tmp_path).count("call.finished") == 1


async def _rule(client: Client, handle: str | None = None) -> tuple[str, str]:
    """What becomes of the call, and the handle of its run."""
    named: Any = {"meta": {RUN_META_KEY: handle}} if handle else {}
    came = await client.session.call_tool("run_python", {"code": CODE}, **named)
    refused = (came.structured_content or {}).get("refused")
    return (_identifier(refused) if refused["rule"] == "approval.pending" else refused["rule"]) if refused else "ran", (
        came.meta or {}
    ).get(RUN_META_KEY, "")


async def test_the_handle_of_a_run_is_its_principals(options: list[str], tmp_path: Path) -> None:
    """Another client of the same caller is asked anew unless it names the run, in which the yes is good once.

    Another caller's client that sends the handle is refused, and uses nothing up.
    """

    def client(server: Served, token: str, name: str) -> Any:
        return server.client("http", "modern", token, client_info=Implementation(name=name, version="1"))

    async with (
        whole_server(options, "http", "alice", "bob") as server,
        client(server, "alice", "editor") as editor,
        client(server, "alice", "other") as other,
        client(server, "bob", "editor") as stranger,
    ):
        asked, handle = await _rule(editor)
        operate(["approvals", "allow", asked], options)
        elsewhere, _ = await _rule(other)
        assert elsewhere.startswith("a_")
        assert elsewhere != asked
        assert (await _rule(stranger, handle))[0] == "run.handle"
        assert (await _rule(stranger))[0] not in {"ran", asked}
        assert (await _rule(other, handle[:-1] + ("A" if handle[-1] != "A" else "B")))[0] == "run.handle"
        assert await _rule(other, handle) == ("ran", handle)
        again, _ = await _rule(editor)
        assert again.startswith("a_")
        assert again != asked
    assert kinds(tmp_path).count("call.finished") == 1
