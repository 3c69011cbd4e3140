"""Ids of runs, and the handles by which clients without sessions name theirs."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.calls import Principal
from glovebox_server.cli.main import main
from glovebox_server.requests import Runs, derive_key, load_key
from glovebox_server.secret_files import SecretFileError
from glovebox_server.transport.auth import PRINCIPAL_SCOPE_KEY
from glovebox_server.transport.serve import by_token

RUNS = Runs(b"k" * 32)
ID = re.compile(r"r_[0-9a-hjkmnp-tv-z]{26}")


def test_a_run_is_one_session_or_one_client_of_one_principal() -> None:
    """The same each time it is asked, and no other's."""
    ids = [
        RUNS.of_session("token:a", "s1"),
        RUNS.of_session("token:a", "s2"),
        RUNS.of_session("token:b", "s1"),
        RUNS.of_client("token:a", "s1"),
        RUNS.of_client("token:as", "1"),
        RUNS.of_client("token:a", None),
        RUNS.of_client("token:b", None),
        Runs(b"o" * 32).of_session("token:a", "s1"),
        RUNS.new(),
        RUNS.new(),
    ]
    assert len(set(ids)) == len(ids)
    assert all(ID.fullmatch(each) for each in ids)
    assert RUNS.of_session("token:a", "s1") == ids[0]


def test_a_handle_names_its_run_for_its_principal_alone() -> None:
    """The control is its owner; everything else is refused by name, and uses nothing up."""
    run = RUNS.new()
    handle = RUNS.handle("token:a", run)
    assert RUNS.named("token:a", handle) == run
    other = RUNS.handle("token:a", RUNS.new())
    wrong: list[object] = [
        "", run, f"{run}.", handle[:-1], handle + "=", handle.upper(), handle + handle, f" {handle[1:]}",
        f"{run}.{other.partition('.')[2]}", "\udcff" * len(handle), None, 7, {"run": handle}, [handle],
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(RefusedError) as refused:
            RUNS.named("token:a", each)
        assert refused.value.rule == "run.handle"
    for principal, runs in (("token:b", RUNS), ("token:a", Runs(b"o" * 32))):
        with pytest.raises(RefusedError):
            runs.named(principal, handle)
    assert RUNS.named("token:a", handle) == run


def test_servers_of_one_state_directory_have_one_key(tmp_path: Path) -> None:
    """Made once, for its owner alone; a key derived for one use says nothing of another's."""
    state = tmp_path / "state"
    key = load_key(state)
    assert load_key(state) == key
    assert (state / "keys" / "server.key").stat().st_mode & 0o777 == 0o600
    assert len({key, derive_key(key, "runs"), derive_key(key, "states")}) == 3
    (state / "keys" / "server.key").chmod(0o644)
    with pytest.raises(SecretFileError, match="chmod 600"):
        load_key(state)
    (state / "keys" / "server.key").chmod(0o600)
    (state / "keys" / "server.key").write_bytes(b"short")
    with pytest.raises(SecretFileError, match="does not hold 32 bytes"):
        load_key(state)


@pytest.mark.parametrize(("bound", "found"), [("release", "release"), (None, "nightly")])
def test_a_tokens_workflow_comes_before_the_servers(bound: str | None, found: str) -> None:
    """What it is bound to is narrower; one without has the server's."""
    principal = Principal(id="token:a", transport="http", workflow=bound)
    request = SimpleNamespace(scope={PRINCIPAL_SCOPE_KEY: principal})
    context: Any = SimpleNamespace(request=request, session=SimpleNamespace(client_params=None))
    assert by_token(context, workflow="nightly").workflow == found


@pytest.mark.parametrize(
    "options",
    [["--run", "r_1"], ["--run", RUNS.new().upper()], ["--run", ""], ["--workflow", "A"], ["--workflow", "a b"],
     ["--workflow", "a\n"], ["--workflow", "a" * 65]],
)  # fmt: skip
def test_what_is_no_run_or_workflow_is_a_mistake(options: list[str]) -> None:
    """Before anything is done; the message says what one looks like."""
    made = CliRunner().invoke(main, ["call", "run_python", "--code", "1", *options])
    assert made.exit_code == 2
    assert "is none: " in made.output
