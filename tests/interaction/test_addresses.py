"""Where a server listens, and under which names."""

from pathlib import Path

import pytest
from tests.interaction.fakes import as_app, fake_app
from tests.interaction.served import served

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.transport.serve import host_names, serve_http


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - what must be refused
async def test_an_open_address_needs_names(host: str, tmp_path: Path) -> None:
    """M1: an address that others can reach is not listened on until somebody says under which names."""
    async with fake_app(tmp_path) as app:
        with pytest.raises(DiagnosedError, match="--allowed-host"):
            await serve_http(as_app(app), host=host)


@pytest.mark.parametrize("name", ["a..b", f"{'a' * 64}.example", "\ud800"])
async def test_what_is_no_name_of_a_host_is_not_listened_on(name: str, tmp_path: Path) -> None:
    """One sentence, before anything is looked up."""
    async with fake_app(tmp_path) as app:
        with pytest.raises(DiagnosedError, match="no name of a host"):
            await serve_http(as_app(app), host=name)


@pytest.mark.parametrize("name", ["*", "[x", "bad host", "http://here", "", ":80", "-a", "here/path", "a:b"])
async def test_a_host_to_accept_is_one_that_clients_can_send(name: str, tmp_path: Path) -> None:
    """The control: such a name, with its port or without, is accepted; see ``test_gate`` of other names."""
    for sound in ("here", "a.b-c.example:443", "127.0.0.1:80", "[::1]:80"):
        assert sound in host_names("127.0.0.1", 80, [sound])
    async with fake_app(tmp_path) as app:
        with pytest.raises(DiagnosedError, match="no name of a host"):
            await serve_http(as_app(app), allowed_hosts=[name])


@pytest.mark.parametrize("name", ["*", "10.0.0.1/24", "proxy.example", ""])
async def test_a_trusted_proxy_is_an_address_or_a_network(name: str, tmp_path: Path) -> None:
    """A name, or everybody, would let clients say whose they are; with an address it listens (see test_oauth_gate)."""
    async with fake_app(tmp_path) as app:
        with pytest.raises(DiagnosedError, match="--trusted-proxy"):
            await serve_http(as_app(app), trusted_proxies=[name])


async def test_an_address_that_is_taken_is_explained(tmp_path: Path) -> None:
    """One sentence with the port, no traceback."""
    async with served(tmp_path, "http") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(DiagnosedError, match=f"port {port}"):
            await serve_http(as_app(server.app), port=port)
