"""A policy that is changed while two servers run on one state directory: taken by both, or by neither."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client
from tests.interaction.test_tenants import GLOVEBOX, client_of, options, served

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await holds():  # noqa: ASYNC110 - what is awaited is another process
            await anyio.sleep(0.2)


async def _rule(client: Client) -> str | None:
    """By which rule a program is refused."""
    found = (await client.call_tool("run_python", {"code": "1"})).structured_content or {}
    return found["refused"]["rule"] if "refused" in found else None


def _write(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


async def test_a_change_is_in_force_in_every_server_and_a_broken_one_in_none(
    options: list[str], tmp_path: Path
) -> None:
    """A role gets a tool and loses it again; a call under way ends well; a file that is wrong is told in /health."""
    path = tmp_path / "policy.toml"
    text = path.read_text()
    wider = text.replace('tools = ["list_workspace_files", "read_workspace_file"]', 'tools = ["run_python"]', 1)
    wider = wider.replace('expect = "deny"\nrule = "role.tools"', 'expect = "allow"')
    with served(options, tmp_path) as (url, tokens), served(options, tmp_path) as (other, _):
        async with client_of(url, tokens["support"], "auto") as one, client_of(other, tokens["support"], "auto") as two:

            async def both(rule: str | None) -> bool:
                return {await _rule(one), await _rule(two)} == {rule}

            async def health(base: str) -> dict[str, Any]:
                async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {tokens['support']}"}) as http:
                    told: dict[str, Any] = (await http.get(f"{base}/health")).json()
                    return told

            assert await both("role.tools")
            _write(path, wider)
            await _until(lambda: both(None))
            assert [tool.name for tool in (await one.list_tools()).tools] == ["run_python"]
            ended: list[Any] = []

            async def long() -> None:
                code = "import time; time.sleep(6); print('done')"
                ended.append((await one.call_tool("run_python", {"code": code})).structured_content)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long)
                await anyio.sleep(1)
                _write(path, text)
                await _until(lambda: both("role.tools"))
                assert not ended
            assert ended[0]["stdout"]["text"] == "done\n"

            _write(path, wider.replace("version = 1", "version = 2"))

            async def told(unusable: bool) -> bool:
                return [(await health(each))["unusable_policy"] for each in (url, other)] == [unusable] * 2

            await _until(lambda: told(unusable=True))
            assert await both("role.tools")
            doctor = await anyio.run_process([GLOVEBOX, "doctor", *options], check=False)
            assert b"version" in doctor.stdout
            _write(path, text)
            await _until(lambda: told(unusable=False))

            # A token that is bound to a role which only a later policy has comes in once that is in force.
            _write(path, text.replace("[principals]", '[roles.late]\ntools = ["run_python"]\n[principals]'))
            made = await anyio.run_process([GLOVEBOX, "token", "create", "late", "--role", "late", "--json", *options])
            headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}"}
            async with httpx2.AsyncClient() as http:

                async def known() -> bool:
                    found = [await http.get(f"{each}/health", headers=headers) for each in (url, other)]
                    return [each.status_code for each in found] == [200, 200]

                await _until(known)
    records = [json.loads(line) for line in (tmp_path / "state/audit/audit.jsonl").read_text().splitlines()]
    kinds = [each["kind"] for each in records]
    assert kinds.count("policy.changed") == 2 * 3
    assert kinds.count("policy.refused") == 2
