"""``glovebox token`` and ``client-config`` as an operator types them, beside a server that runs."""

import json
import re
import stat
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner, Result
from tests.interaction.served import served, until
from tests.interaction.test_token_changes import health, settled

from glovebox_audit import read
from glovebox_server.cli.main import main
from glovebox_server.exits import USAGE
from glovebox_server.transport import serve

TOKEN = re.compile(r"gbx_[A-Za-z0-9_-]{43}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give answers little time."""
    monkeypatch.setattr(serve, "TOKEN_SECONDS", 0.02)
    monkeypatch.setattr(serve, "GRACE_SECONDS", 0.2)


def glovebox(state: Path, *words: str, code: int | None = None) -> Result:
    """Type a command, which exits with ``code`` where that is said."""
    done = CliRunner().invoke(main, [*words, "--state-dir", str(state)])
    assert code in (None, done.exit_code), done.output
    return done


async def test_a_made_token_lets_in_at_once_and_a_revoked_one_no_longer(tmp_path: Path) -> None:
    """Shown once, listed without itself, in the log without itself; another caller is never refused (the control)."""
    async with served(tmp_path, "http") as server:
        made = await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "create", "ci", "--expires", "30d")
        assert made.exit_code == 0
        secret = made.stdout.strip()
        assert TOKEN.fullmatch(secret)
        await settled(server, secret, 200)
        await until((tmp_path / "tokens" / ".used" / "ci").exists)
        listed = await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "list", "--json")
        (ci,) = [each for each in json.loads(listed.stdout)["tokens"] if each["name"] == "ci"]
        assert (ci["principal"], ci["role"]) == ("token:ci", None)
        used = datetime.fromisoformat(ci["last_used"])
        assert abs((datetime.now(UTC) - used).total_seconds()) < 60
        again = await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "create", "ci")
        assert again.exit_code == 2
        assert "there is one of this name" in again.output
        revoked = await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "revoke", "ci")
        assert revoked.exit_code == 0
        await settled(server, secret, 401)
        assert (await health(server, server.tokens["alice"]))[0] == 200
        assert (await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "revoke", "ci")).exit_code == 2
    records = [line.record for line in read.tail(tmp_path / "audit", 100) if line.record]
    told = [(record.kind, record.data["principal"]) for record in records if record.kind.startswith("token.")]
    assert told == [("token.created", "token:ci"), ("token.revoked", "token:ci")]
    for each in [*(tmp_path / "audit").rglob("*"), *(tmp_path / "tokens").iterdir()]:
        assert not each.is_file() or secret.encode() not in each.read_bytes()


async def test_a_token_that_expires_ends_what_was_begun_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is revoked, and the record of its call says why; another's call goes on (the control)."""
    async with served(tmp_path, "http") as server:
        made = await anyio.to_thread.run_sync(glovebox, tmp_path, "token", "create", "brief", "--expires", "90m")
        server.tokens["brief"] = made.stdout.strip()
        await settled(server, server.tokens["brief"], 200)
        later = datetime.now(UTC).timestamp() + 5401
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_call, server, "brief")
            tasks.start_soon(_call, server, "bob")
            await until(lambda: len(server.app.broker.running) == 2)
            monkeypatch.setattr("glovebox_server.transport.serve.time.time", lambda: later)
            await until(lambda: len(server.app.broker.cancelled) == 1)
            await until(lambda: len(server.app.broker.running) == 1)
            assert (await health(server, server.tokens["brief"]))[0] == 401
            server.app.broker.release.set()
        assert len(server.app.broker.finished) == 1


async def _call(server: object, name: str) -> None:
    try:
        async with server.client("http", "modern", name) as client:  # type: ignore[attr-defined]  # of the fixture
            await client.call_tool("run_python", {"code": "wait"})
    except Exception:  # noqa: BLE001 - one of the two ends so
        assert name == "brief"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("Bad",), "1 to 32 of a-z"), (("../x",), "1 to 32 of a-z"), (("a" * 33,), "1 to 32 of a-z"),
        (("ci", "--role", "analyst"), "no role 'analyst'"), (("ci", "--workflow", "Re lease"), "is none: 1 to 64"),
        (("ci", "--expires", "never"), "is not how long"), (("ci", "--expires", "0d"), "is not how long"),
    ],
)  # fmt: skip
def test_what_no_token_can_be_is_told_and_makes_none(words: tuple[str, ...], why: str, tmp_path: Path) -> None:
    """Exit 2; nothing is made or recorded. The control makes one."""
    state = tmp_path / "state"
    told = glovebox(state, "token", "create", *words)
    assert told.exit_code == 2, told.output
    assert why in told.output
    assert json.loads(glovebox(state, "token", "list", "--json").stdout)["tokens"] == []
    assert not (state / "audit").exists()
    assert glovebox(state, "token", "create", "ci").exit_code == 0


def test_a_role_and_a_workflow_are_the_policys(tmp_path: Path) -> None:
    """Of the shipped example: others are told, with those that there are; these are bound and listed (the control)."""
    policy = ("--policy", str(Path(__file__).parents[2] / "examples" / "policy.toml"))
    for words, why in (
        (("--role", "analist"), "there is no role 'analist'. Those of policy.toml are reader, analyst"),
        (("--workflow", "deploy"), "there is no workflow 'deploy'"),
    ):
        told = glovebox(tmp_path / "state", "token", "create", "ci", *words, *policy)
        assert (told.exit_code, why in told.output) == (2, True), told.output
    made = glovebox(
        tmp_path / "state", "token", "create", "ci", "--role", "analyst", "--workflow", "release", *policy, "--json"
    )
    (listed,) = json.loads(glovebox(tmp_path / "state", "token", "list", "--json").stdout)["tokens"]
    assert listed == {name: value for name, value in json.loads(made.stdout).items() if name != "token"}
    assert (listed["role"], listed["workflow"]) == ("analyst", "release")


def test_client_config_makes_no_token_unless_one_is_asked_for(tmp_path: Path) -> None:
    """JSON parses and holds the token where it must and nowhere else; without one asked for there is a placeholder."""
    state, http = tmp_path / "state", ("client-config", "--transport", "http")
    none = glovebox(state, *http)
    assert not TOKEN.findall(none.stdout)
    assert '"Authorization": "Bearer TOKEN"' in none.stdout
    assert "`--token NAME` makes one" in none.stderr
    assert not list((state / "tokens").glob("*"))

    first = glovebox(state, *http, "--token", "laptop", "--expires", "30d")
    assert "Made token:laptop" in first.stderr
    (token,) = set(TOKEN.findall(first.stdout))
    assert token not in (state / "tokens" / "laptop").read_text()
    assert stat.S_IMODE((state / "tokens" / "laptop").stat().st_mode) == 0o600
    (listed,) = json.loads(glovebox(state, "token", "list", "--json").stdout)["tokens"]
    assert listed["expires"] is not None
    blocks = [json.loads(part[part.index("{") :]) for part in first.stdout.split("\n\n") if "{\n" in part]
    assert len(blocks) == 3
    assert "http://127.0.0.1:8321/mcp" in json.dumps(blocks[2])
    assert token in json.dumps(blocks[2])
    assert token not in json.dumps(blocks[1]), "VS Code asks for it"
    assert "http://127.0.0.1:8321/sse" in first.stdout

    again = glovebox(state, *http, "--token", "laptop", code=USAGE)
    assert "only the hash is kept" in again.stderr
    assert not again.stdout
    saved = tmp_path / "saved"
    saved.write_text(f"{token}\n")
    third = glovebox(state, *http, "--token-file", str(saved), "--host", "glovebox.example", "--port", "443")
    assert set(TOKEN.findall(third.stdout)) == {token}
    assert "https://glovebox.example:443/mcp" in third.stdout
    saved.write_text("gbx_" + "x" * 43)
    assert "none of this server's tokens" in glovebox(state, *http, "--token-file", str(saved), code=USAGE).stderr


@pytest.mark.parametrize(
    "wrong", [("--role", "a"), ("--expires", "1d"), ("--token", "a", "--token-file", "b"), ("--token", "No name")]
)
def test_client_config_refuses_what_would_be_ignored(wrong: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 2, and no token is made; nor is one over stdio, where nobody shows it."""
    for transport in ("http", "stdio"):
        glovebox(tmp_path / "state", "client-config", "--transport", transport, *wrong, code=USAGE)
    assert not list((tmp_path / "state").glob("tokens/*"))


def test_the_bridge_is_pinned_to_a_version_that_runs_no_command_of_the_servers(tmp_path: Path) -> None:
    """CVE-2025-6514 is in 0.0.5 to 0.1.15 of mcp-remote."""
    told = glovebox(tmp_path / "state", "client-config", "--transport", "http").stdout
    (version,) = re.findall(r'"mcp-remote@(\d+)\.(\d+)\.(\d+)"', told)
    assert tuple(map(int, version)) >= (0, 1, 16)


def test_client_config_over_stdio_names_whole_paths_and_no_token(tmp_path: Path) -> None:
    """Desktop applications start servers elsewhere, with another PATH."""
    workspace = tmp_path / "work"
    workspace.mkdir()
    told = glovebox(tmp_path / "state", "client-config", "--workspace", str(workspace))
    assert not TOKEN.search(told.stdout)
    assert not (tmp_path / "state").exists()
    for part in told.stdout.strip().split("\n\n")[1:]:
        (server,) = next(iter(json.loads(part[part.index("{") :]).values())).values()
        assert Path(server["command"]).is_absolute()
        assert server["args"][:3] == ["serve", "--workspace", str(workspace)]
