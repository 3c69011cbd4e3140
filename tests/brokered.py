"""Whole calls, as a client's would be, on the private internet of ``tests.internet``: nothing between is replaced.

Only two things are told to the server from outside: names resolve as the test says, and the trust store is a file that
holds the test's own authority (``SSL_CERT_FILE``, as an operator would set it).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.internet import Internet

from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.audit.chain import Record
from glovebox_server.audit.read import records_of
from glovebox_server.broker import network as call_network
from glovebox_server.broker.arguments import validated
from glovebox_server.broker.calls import CallResult, Principal, Text, ToolCall
from glovebox_server.egress import gate, serve
from glovebox_server.egress.gate import EgressGate
from glovebox_server.ids import new_call_id
from glovebox_server.settings import Settings

DRIVERS = [
    pytest.param("bubblewrap", marks=pytest.mark.driver("bubblewrap")),
    pytest.param("docker", marks=pytest.mark.driver("docker")),
    pytest.param("gvisor", marks=pytest.mark.driver("gvisor")),
]


class Heard:
    """A listener that keeps what is printed."""

    def __init__(self) -> None:
        self.text = ""

    def progress(self, message: str) -> None:
        """Ignore signs of life."""

    def printed(self, text: str) -> None:
        """Keep it."""
        self.text += text

    def ended_by(self) -> str:
        """Nobody else ends these calls."""
        return "client"


@dataclass
class Called:
    """What came of one call."""

    result: CallResult
    records: list[Record]
    """Its audit records, in order."""
    heard: str
    """What a listener was told of standard output."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The structured result."""
        return self.result.structured

    @property
    def text(self) -> str:
        """All text blocks."""
        return "\n".join(block.text for block in self.result.content if isinstance(block, Text))

    @property
    def stdout(self) -> str:
        """What a program printed."""
        text: str = self.result.structured["stdout"]["text"]
        return text

    @property
    def stderr(self) -> str:
        """What it printed as errors."""
        text: str = self.result.structured["stderr"]["text"]
        return text

    @property
    def kinds(self) -> list[str]:
        """Kinds of all records."""
        return [record.kind for record in self.records]

    @property
    def egress(self) -> list[tuple[str, str, str | None]]:
        """Effect, rule and dialled address of each connection's record."""
        found = [record.data for record in self.records if record.kind == "egress.decided"]
        return [(data["effect"], data["rule"], data.get("address")) for data in found]

    @property
    def usage(self) -> Mapping[str, Any]:
        """What the last record but the receipt says was spent."""
        assert self.kinds[-2:] == ["call.finished", "receipt.signed"]
        used: Mapping[str, Any] = self.records[-2].data["usage"]
        return used


@dataclass
class Glovebox:
    """A whole server without a transport."""

    app: App

    async def call(self, tool: str, **arguments: Any) -> Called:
        """Make one call to its end."""
        call = ToolCall(
            id=new_call_id(),
            principal=Principal(id="local:test", transport="cli"),
            session=None,
            tool=tool,
            arguments=validated(self.app.tools[tool], arguments),
            received=datetime.now(UTC),
        )
        heard = Heard()
        result = await self.app.broker.call(call, heard)
        records = list(records_of(self.app.settings.state_dir / "audit", call.id))
        return Called(result=result, records=records, heard=heard.text)


def profile(tool: str, driver: str, *rules: str, wall: int = 20, **network: str | int) -> str:
    """An operator's profile: TOML text with these ``network.allow`` entries; none at all means no network."""
    lines = [f'tool = "{tool}"', 'description = "For a test."', 'risk = "medium"', f'isolation = ["{driver}"]']
    lines += ['approval = "none"', "[network]"]
    if rules:
        lines += ['mode = "egress"', f"allow = [{', '.join(rules)}]"]
        lines += [f"{key} = {value!r}".replace("'", '"') for key, value in network.items()]
    else:
        lines.append('mode = "none"')
    lines += ["[limits]", f"wall_seconds = {wall}", "cpu_seconds = 10", 'memory = "256 MiB"', "pids = 32"]
    lines += ['scratch = "4 MiB"', 'stream = "64 KiB"', 'enforce = "any"', ""]
    return "\n".join(lines)


@asynccontextmanager
async def glovebox(net: Internet, directory: Path, *profiles: str) -> AsyncIterator[Glovebox]:
    """A server with these operator's profiles (over the shipped ones), at home in ``net``."""
    own, workspace = directory / "profiles", directory / "workspace"
    own.mkdir()
    workspace.mkdir()
    workspace.chmod(0o755)
    for text in profiles:
        tool = text.partition('"')[2].partition('"')[0]
        (own / f"{tool}.toml").write_text(text)
    store = directory / "authority.pem"
    net.authority.cert_pem.write_to_path(store)
    settings = Settings(workspace=workspace, profiles_dir=own, state_dir=directory / "state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(store))
        patch.setenv("SSL_CERT_DIR", str(own))
        patch.setattr(call_network, "EgressGate", partial(EgressGate, resolver=net.resolve))
        _forget_trust()
        try:
            async with apps.opened(settings, "cli") as app:
                yield Glovebox(app)
        finally:
            _forget_trust()


def _forget_trust() -> None:
    gate._system_tls.cache_clear()
    serve.authorities.cache_clear()
