"""Files that are named as secrets are reach no caller of the jobs that read the workspace for it."""

import asyncio
import csv
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters
from tests.fixtures.brokered import profile, submitted
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.workspace import hidden, paths, tree
from glovebox_server import app as apps
from glovebox_server.calls import Principal
from glovebox_server.guards.watch.canaries import plant
from glovebox_server.mcp.prompts import complete
from glovebox_server.settings import Settings

MARK = "planted-5f1c"
_KEY = f"-----BEGIN PRIVATE KEY-----\n{MARK}\n"
SECRETS: Mapping[str, str] = {
    ".env": f"KEY={MARK}",
    ".env.local": MARK,
    "service/.env.production": MARK,
    ".envrc": MARK,
    "prod.env": MARK,
    ".ENV": MARK,
    ".env.bak": MARK,
    "keys/id_rsa": MARK,
    "keys/id_ed25519~": MARK,
    "keys/server.key": MARK,
    "keys/server.pem": _KEY,
    "keys/both.crt": f"-----BEGIN CERTIFICATE-----\n{_KEY}",
    "keys/store.jks": MARK,
    "keys/store.p12": MARK,
    "keys/store.pfx": MARK,
    ".ssh/config": MARK,
    ".gnupg/private-keys-v1.d/A.key": MARK,
    "home/.aws/credentials": MARK,
    ".config/gcloud/credentials.db": MARK,
    ".azure/accessTokens.json": MARK,
    "client_secret_42.json": MARK,
    ".kube/config": MARK,
    ".docker/config.json": MARK,
    ".netrc": MARK,
    ".git-credentials": MARK,
    ".npmrc": f"//registry.example.org/:_authToken={MARK}",
    ".pypirc": f"[pypi]\npassword = {MARK}",
    "pip.conf": f"[global]\nindex-url = https://{MARK}0123@pypi.example.org/simple",
    ".git/config": f'[remote "origin"]\nurl = https://me:{MARK}@example.org/a.git',
    ".git/modules/a/config": f"url = https://{MARK}0123456789@example.org/a.git",
    "terraform.tfstate": MARK,
    "old/terraform.tfstate.backup": MARK,
    "secrets.yaml": MARK,
    ".vault-token": MARK,
    ".pgpass": MARK,
    ".cargo/credentials.toml": MARK,
    ".bash_history": MARK,
    ".notes.txt.swp": MARK,
    "emacs/#.env#": MARK,
    "emacs/#credentials.json#": MARK,
    "emacs/secrets.yaml.~12~": MARK,
    "big.pem": "x" * hidden.MAX_LOOKED + MARK,
}
ORDINARY: Mapping[str, str] = {
    ".env.example": MARK,
    ".env.sample": MARK,
    "client_secret.json.template": MARK,
    "keys/id_rsa.pub": MARK,
    "keys/chain.pem": f"-----BEGIN CERTIFICATE-----\n{MARK}",
    "environment.yml": MARK,
    "env.py": MARK,
    "keys.py": MARK,
    "monkey": MARK,
    "web/.npmrc": f"save-exact=true\n//registry.example.org/:_authToken=${{NPM_TOKEN}}\nalways-auth=true\n{MARK}",
    "web/pip.conf": "[global]\nindex-url = https://${TOKEN_OF_THE_TEAM}@pypi.example.org/simple\n"
    f"extra-index-url = https://reader@pypi.example.org/simple\n{MARK}",
    "sub/.git/config": f'[remote "origin"]\nurl = git@example.org:a.git\n{MARK}',
    "config": MARK,
    "credentials": MARK,
    "docker/config.json": MARK,
    "aws/credentials": MARK,
    "main.tf": MARK,
    "#main.tf#": MARK,
    "main.tf.~1~": MARK,
    "12~": MARK,
}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with some forty secrets, and files whose names are only like them."""
    made = make(tmp_path / "w", monkeypatch)
    for name, content in ({**SECRETS, **ORDINARY}).items():
        made.write(name, f"{content}\n")
    return made


def searched(workspace: Workspace, **payload: Any) -> set[str]:
    """The files in which the mark is found, those of tools and ignored ones too."""
    found: set[str] = set()
    for path in ("**", ".git/**", "sub/.git/**"):
        value = workspace.run("search", pattern=MARK, path=path, include_ignored=True, limit=1000, **payload)
        found |= {match["path"] for match in value["matches"]}
    return found


@pytest.mark.parametrize("path", SECRETS)
def test_a_file_named_as_a_secret_is_missing_and_the_hint_says_who_can_show_it(workspace: Workspace, path: str) -> None:
    """It is not read, listed or searched by its name; the control is the same file, revealed."""
    error = workspace.run("read", path=path)["error"]
    near, _, hint = error["hint"].rpartition("The nearest: ")[2].rpartition(". Files of such")
    error["hint"] = f"Files of such{hint}" if near else error["hint"]
    assert not set(near.split(", ")) & set(SECRETS)
    assert error["rule"] == "path.missing"
    assert "hidden, whether they exist or not" in error["hint"]
    assert "files.reveal" in error["hint"]
    assert MARK not in str(error)
    assert workspace.run("list", pattern=path) == {"error": error}
    assert workspace.run("search", pattern=MARK, path=path) == {"error": error}
    assert MARK in workspace.run("read", path=path, reveal=[path])["text"] or path == "big.pem"
    assert workspace.run("list", pattern=path, reveal=[path])["total"] == 1
    assert workspace.run("search", pattern=MARK, path=path, reveal=[path])["matches"] or path == "big.pem"


@pytest.mark.parametrize("path", ORDINARY)
def test_what_is_only_named_alike_is_shown(workspace: Workspace, path: str) -> None:
    """Examples, public halves, certificates, and configuration without a password."""
    assert MARK in workspace.run("read", path=path)["text"]


def test_no_walk_shows_any(workspace: Workspace) -> None:
    """A whole listing and search show the ordinary files alone; the control is that all are revealed."""
    assert searched(workspace) == set(ORDINARY)
    assert searched(workspace, reveal=[*SECRETS, ".ssh", ".gnupg", ".azure", ".config/gcloud"]) > set(ORDINARY)
    listed = workspace.run("list", pattern="", limit=1000)
    names = {entry["path"] for entry in listed["entries"]}
    assert not names & set(SECRETS)
    assert ".ssh" not in names


LINKS: Mapping[str, str] = {
    "notes.txt": ".env",
    "second.txt": "notes.txt",
    "folder": ".ssh",
    "cert.txt": "keys/server.pem",
    "through.txt": ".ssh/sub/../../config",
    "beside.txt": "keys/server.pem/../chain.pem",
    "plain.txt": "config",
    ".env.link": "config",
    "chain.txt": ".env.link",
}
"""Each with what it leads to; that of a hidden name is hidden as well."""


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Workspace]:
    """Two workspaces of one content, but that the first has what is hidden."""
    directory = tmp_path_factory.mktemp("twins")
    with pytest.MonkeyPatch.context() as patch:
        made = make(directory / "with", patch), make(directory / "without", patch)
    shown = hidden.HiddenPaths()
    for place, files in zip(made, ({**SECRETS, **ORDINARY}, ORDINARY), strict=True):
        for name in (*SECRETS, *LINKS):
            for folder in Path(name).parents:
                if shown.kind(folder.parts) is None:
                    (place.root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            place.write(name, f"{content}\n")
        for name, target in LINKS.items():
            if files is not ORDINARY or shown.kind([name]) is None:
                (place.root / name).symlink_to(target)
        for path in place.root.rglob("*"):
            if not path.is_dir() or path.is_symlink():  # the time of a folder is that of the last change in it
                os.utime(path, (0, 1_000_000_000), follow_symlinks=False)
    (made[0].root / ".ssh/sub").mkdir()
    return made


def guesses(path: str) -> set[str]:
    """Patterns and paths by which a caller would try to find out about a path: letter by letter, around and below."""
    folder, slash, name = path.rpartition("/")
    tried = {
        f"{name[:at]}{rest}" for at in range(len(name) + 1) for rest in ("*", "?*", f"[{name[at : at + 1] or 'x'}]*")
    }
    tried |= {
        f"{{{name},nothing}}",
        f"{name[:-1]}?",
        name,
        f"{name}/",
        f"{name}/*",
        f"{name}/../*",
        f"./{name}",
        name.upper(),
    }
    return {folder + slash + pattern for pattern in tried} | {
        f"**/{name[0]}*",
        f"**/{name[:-1]}[!-]",
        folder,
        path + "x",
    }


@pytest.mark.parametrize("path", [*SECRETS, *LINKS, "keys/chain.pem", "", "**"])
def test_no_answer_depends_on_what_is_hidden(
    path: str, twins: tuple[Workspace, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, listed and searched, each answer is the same bytes in a workspace that differs in hidden files alone."""
    asked: list[tuple[str, dict[str, Any]]] = [("list", {"pattern": path, "limit": limit}) for limit in (1, 9, 1000)]
    for guess in sorted(guesses(path) if path.strip("*") else {path}):
        asked += [
            ("read", {"path": guess}),
            ("list", {"pattern": guess, "include_ignored": True}),
            ("search", {"pattern": MARK, "path": guess, "limit": 50}),
        ]
    for kind, payload in asked:
        answers = []
        for place in twins:
            monkeypatch.setattr(paths, "ROOT", str(place.root))
            answers.append(json.dumps(place.run(kind, **payload)))
        assert answers[0] == answers[1], (kind, payload)


def test_no_bound_of_a_walk_counts_what_is_hidden(
    twins: tuple[Workspace, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many names as may be looked at are not fewer for those; the control is one less."""
    place, without = twins
    monkeypatch.setattr(paths, "ROOT", str(without.root))
    names = without.run("list", pattern="", limit=1000)["scanned"]
    monkeypatch.setattr(paths, "ROOT", str(place.root))
    for most, stopped in ((names, False), (names - 1, True)):
        monkeypatch.setattr(tree, "MAX_ENTRIES", most)
        value = place.run("list", pattern="", limit=1000)
        assert value["scanned"] == most
        assert ("stopped after" in str(value["truncated"])) == stopped


@pytest.mark.parametrize(
    "path", ["x/../.env", "./.env", "/workspace/.env", ".aws/../.env", "home/.aws/sub/../credentials"]
)
def test_other_spellings_are_hidden_too(workspace: Workspace, path: str) -> None:
    """Dots and the sandbox's own name for the workspace change nothing."""
    for folder in ("x", ".aws", "home/.aws/sub"):
        (workspace.root / folder).mkdir(parents=True, exist_ok=True)
    path = path.replace("/workspace", paths.ROOT)
    assert workspace.rule("read", path=path) == "path.missing"
    assert workspace.run("read", path=path.replace(".env", "config").replace("credentials", "../../config")).get("text")


def test_links_neither_show_what_is_hidden_nor_hide_behind(workspace: Workspace) -> None:
    """To a hidden file, through a hidden folder, of a hidden name, and in a chain; the control is a plain link."""
    for name, target in LINKS.items():
        (workspace.root / name).symlink_to(target)
    for path in ("notes.txt", "second.txt", "folder/config", "cert.txt", "through.txt", ".env.link", "chain.txt"):
        assert workspace.rule("read", path=path) == "path.missing", path
    assert workspace.rule("list", pattern="folder/*") == "path.missing"
    assert workspace.rule("search", pattern=MARK, path="folder") == "path.missing"
    assert MARK in workspace.run("read", path="plain.txt")["text"]


def test_a_revealed_path_shows_itself_and_what_is_in_it_and_nothing_beside(workspace: Workspace) -> None:
    """Of a folder all below; a name that begins alike is another."""
    reveal = [".ssh", "service"]
    assert MARK in workspace.run("read", path=".ssh/config", reveal=reveal)["text"]
    assert MARK in workspace.run("read", path="service/.env.production", reveal=reveal)["text"]
    assert workspace.rule("read", path=".env", reveal=[".en", ".env.local"]) == "path.missing"
    assert (
        MARK
        in workspace.run("read", path=".gnupg/private-keys-v1.d/A.key", reveal=[".gnupg/private-keys-v1.d"])["text"]
    )
    assert {match["path"] for match in workspace.run("search", pattern=MARK, reveal=reveal)["matches"]} >= {
        ".ssh/config",
        "service/.env.production",
    }


def test_beside_what_is_revealed_it_is_not_told_whether_there_is_such_a_file(workspace: Workspace) -> None:
    """Reached by ``..`` through what is revealed; the controls are what is revealed, and an ordinary name."""
    there, missing = (
        workspace.run("read", path=path, reveal=["service"])["error"]
        for path in ("service/../.env", "service/../.env.x")
    )
    assert there["rule"] == "path.missing"
    assert str(missing) == str(there).replace("/.env:", "/.env.x:")
    assert MARK in workspace.run("read", path="service/.env.production", reveal=["service"])["text"]
    assert workspace.rule("read", path="service/../env.x", reveal=["service"]) == "path.missing"
    assert MARK in workspace.run("read", path="service/../config", reveal=["service"])["text"]


def test_what_is_no_file_does_not_make_a_look_wait(workspace: Workspace) -> None:
    """A FIFO under a name whose content decides is looked at without waiting for a writer."""
    os.mkfifo(workspace.root / "pipe.pem")
    assert workspace.rule("read", path="pipe.pem") == "path.special"
    assert "pipe.pem" in {entry["path"] for entry in workspace.run("list", pattern="*.pem")["entries"]}


def test_the_published_list_is_the_one_in_force() -> None:
    """Each row of docs/operate/secret-files.csv is one of the guest's, in its order."""
    with (Path(__file__).parents[2] / "docs/operate/secret-files.csv").open(newline="", encoding="utf-8") as table:
        _, *rows = csv.reader(table)
    looked = {True: "if it holds one", False: "always"}
    assert rows == [[names, what, looked[what in hidden.CONTENTS]] for what, names in hidden.KINDS.items()]


REVEAL = """\
reveal = [{ path = "service/.env.production", reason = "The tests read it, and it holds no secret." }]
[network]"""


@pytest.mark.driver("bubblewrap")
async def test_whole_calls_hide_what_the_profile_does_not_reveal(tmp_path: Path) -> None:
    """Through broker and real sandboxes: read, list, search and completion; a canary is shown."""
    place = tmp_path / "workspace"
    for name, content in ({**SECRETS, **ORDINARY}).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{content}\n")
    own = tmp_path / "profiles"
    own.mkdir()
    (own / "read_workspace_file.toml").write_text(
        profile("read_workspace_file", "bubblewrap").replace("[network]", f'[files]\nworkspace = "read"\n{REVEAL}')
    )
    canary = plant(tmp_path / "state", place, "deploy-credentials.env")
    async with apps.opened(Settings(workspace=place, profiles_dir=own, state_dir=tmp_path / "state"), "cli") as app:
        named = SECRETS.keys() - {"service/.env.production"}
        read = [submitted(app, "read_workspace_file", {"path": path}) for path in named]
        answers = await asyncio.gather(*read)
        for path, refused in zip(named, answers, strict=True):
            assert (refused.structured["error"]["kind"], refused.failed) == ("path.missing", True), path
        # Only who calls over stdio may name files as the host does.
        outside = await submitted(app, "read_workspace_file", {"path": str(place / "config")})
        assert outside.structured["error"]["kind"] == "path.outside"
        shown = await submitted(app, "read_workspace_file", {"path": "service/.env.production"})
        assert shown.structured["text"] == f"{MARK}\n"
        listed = await submitted(app, "list_workspace_files", {"pattern": "*.env"})
        assert [entry["path"] for entry in listed.structured["entries"]] == [canary.path]
        found = await submitted(app, "search_workspace", {"pattern": MARK, "include_ignored": True, "limit": 1000})
        assert not {match["path"] for match in found.structured["matches"]} & set(SECRETS)
        asked = types.CompleteRequestParams(
            ref=types.PromptReference(name="analyse_file"), argument=types.CompletionArgument(name="path", value=".e")
        )
        me = Principal(id="local:test", transport="cli")
        completed = await complete(asked, me, app.broker.submit, app.artifacts.owned, app.tools)
        assert set(completed.completion.values) == {".env.example", ".env.sample"}


@pytest.mark.driver("bubblewrap")
async def test_a_client_gets_the_same_answers_without_the_hidden_files(tmp_path: Path, runtime_dir: Path) -> None:
    """Of an installed server, over its own pipes; the control is an ordinary file."""
    place = tmp_path / "workspace"
    (place / "keys").mkdir(parents=True)
    secrets = {name: content for name, content in SECRETS.items() if name.startswith("keys/") or name == ".env"}
    for name, content in ({**secrets, "keys/chain.pem": "public", "a.txt": MARK}).items():
        (place / name).write_text(content)
    command = str(Path(sys.executable).with_name("glovebox"))
    # The client passes few variables on, and none of ours.
    options = [
        "serve",
        "--workspace",
        str(place),
        "--state-dir",
        str(tmp_path / "state"),
        "--data-dir",
        str(runtime_dir),
    ]
    calls = [
        ("list_workspace_files", {"pattern": "**/*e*"}),
        ("search_workspace", {"pattern": "."}),
        ("read_workspace_file", {"path": "keys/server.pem"}),
        ("read_workspace_file", {"path": "keys/srver.pem"}),
        ("read_workspace_file", {"path": f"{place}/keys/chian.pem"}),
        ("read_workspace_file", {"path": f"{place}/keys/chain.pem"}),
    ]

    async def answers(client: Client) -> list[str]:
        found = []
        for result in await asyncio.gather(*(client.call_tool(tool, arguments) for tool, arguments in calls)):
            own = ("call_id", "elapsed_ms")
            structured = {key: value for key, value in (result.structured_content or {}).items() if key not in own}
            found.append(json.dumps([structured, [block.model_dump() for block in result.content], result.is_error]))
        prompt = types.PromptReference(name="analyse_file")
        completed = await client.complete(prompt, {"name": "path", "value": "keys/"})
        return [*found, completed.model_dump_json()]

    async with Client(StdioServerParameters(command=command, args=options)) as client:
        before = await answers(client)
        assert "The nearest: keys/chain.pem." in before[4]
        assert '"public"' in before[5]
        for name in secrets:
            (place / name).unlink()
        assert await answers(client) == before
        (place / "a.txt").unlink()
        calls.clear()
        calls.append(("search_workspace", {"pattern": "."}))
        assert (await answers(client))[0] != before[1]
