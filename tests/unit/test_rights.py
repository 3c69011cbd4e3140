"""What callers may do under a policy, and that without one nothing is different."""

from pathlib import Path

import pytest
from tests.fixtures.policy_texts import EVERYTHING, policy

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import Credential
from glovebox_profiles.policy.model import digest
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.runtime import environments
from glovebox_server.calls import Principal
from glovebox_server.core.rights import Rights, Roles, require_workflow
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.workspace import Workspace

PROFILES = load([SHIPPED], check_example=None)
SERVED = Path("/srv/all")
SUPPORT = Path("/srv/support")
KEY = Credential(name="key", host="a.example.org", paths=("/*",), header="Key", source="env:KEY")


def caller(name: str = "token:support", *, roles: tuple[str, ...] = (), workflow: str | None = None) -> Principal:
    """Who calls."""
    return Principal(id=name, transport="http", roles=roles, workflow=workflow)


def rights(principal: Principal, text: str = EVERYTHING) -> Rights:
    """What the policy leaves somebody."""
    return Roles(policy(text), PROFILES, SERVED, {"/srv/support": SUPPORT})(principal)


def test_a_role_has_its_tools_and_refuses_the_others_by_name() -> None:
    """The denial says which role it is and what it has; the control is a tool of the role, and no policy."""
    found = rights(caller())
    assert list(found.profiles) == ["read_workspace_file", "run_python"]
    refused = found.refusal("fetch_url")
    assert refused is not None
    assert refused.rule == "role.tools"
    assert "analyst" in refused.reason
    assert "read_workspace_file, run_python" in refused.hint
    assert found.refusal("run_python") is None
    assert found.offered(TOOLS) == ("read_workspace_file", "run_python")
    assert Rights(profiles=PROFILES, workspace=None).offered(TOOLS) == tuple(TOOLS)
    assert Rights(profiles=PROFILES, workspace=None).refusal("fetch_url") is None


def test_a_role_narrows_the_profile_and_brings_its_workspace_shares_and_guards() -> None:
    """Its digest changes with it; a tool that the role does not narrow keeps profile and digest."""
    found = rights(caller())
    assert found.profiles["run_python"].limits.wall_seconds == 20
    assert found.profiles["run_python"].limits.memory == 256 << 20
    assert found.profiles["run_python"].limits.pids == PROFILES["run_python"].limits.pids
    assert found.profiles.digests["run_python"] != PROFILES.digests["run_python"]
    assert found.profiles.digests["read_workspace_file"] == PROFILES.digests["read_workspace_file"]
    found = rights(caller())
    assert (found.workspace, found.turns, found.artifact_bytes) == (SUPPORT, 4, 256 << 20)
    assert [each.name for each in found.budgets] == ["calls-an-hour"]
    assert [each.name for each in found.approvals] == ["programs"]
    assert [each.what for each in found.lifts] == ["host"]
    assert [each.host for each in found.rates] == ["pypi.org"]
    assert (found.role, found.policy_digest) == ("analyst", digest(policy()))


def test_a_role_of_the_workflow_has_to_allow_too() -> None:
    """What both have is left, and both names are recorded; a workflow that nobody named allows nothing."""
    found = rights(caller(workflow="release"))
    assert (found.role, list(found.profiles)) == ("analyst+releaser", ["run_python"])
    assert found.profiles["run_python"].limits.wall_seconds == 20
    assert [each.name for each in found.budgets] == ["calls-an-hour"]
    assert found.lifts == ()
    unknown = rights(caller(workflow="relase"))
    assert unknown.denial is not None
    assert unknown.denial.rule == "policy.workflow"
    assert not unknown.profiles


def test_a_server_of_a_workflow_that_the_policy_does_not_have_is_refused() -> None:
    """With the nearest; the controls are one that it has, none, and no policy."""
    with pytest.raises(
        ProfileError, match=r'--workflow: the policy has no workflow "relase"\. The nearest is "release"'
    ):
        require_workflow(policy(), "relase")
    for given, workflow in ((policy(), "release"), (policy(), None), (None, "relase")):
        require_workflow(given, workflow)


def test_who_is_not_named_has_the_default_or_nothing() -> None:
    """The denied case is a policy without a default; the control is one with it."""
    assert rights(caller("token:other")).role == "analyst"
    text = EVERYTHING.replace('default = "analyst"\n', "")
    denied = rights(caller("token:other"), text).refusal("run_python")
    assert denied is not None
    assert denied.rule == "policy.principal"
    assert rights(caller(), text).refusal("run_python") is None
    assert rights(caller("oauth:https://id.example#anna"), text).role == "analyst"
    assert rights(caller("oauth:https://id.example.evil#anna"), text).denial is not None


def test_a_tokens_role_narrows_and_never_widens_what_the_principal_has() -> None:
    """Of several, the one that stands first in the file; one that is not there any more allows nothing."""
    assert rights(caller(roles=("releaser",))).role == "analyst+releaser"
    assert rights(caller("token:other", roles=("releaser", "analyst"))).role == "analyst"
    assert rights(caller("token:other", roles=("releaser", "gone"))).role == "releaser"
    gone = rights(caller(roles=("gone",)))
    assert gone.denial is not None
    assert gone.denial.rule == "policy.role"


def test_of_a_rate_that_two_roles_have_the_strictest_counts_once() -> None:
    """Whichever role has it; the control is another window of the same host, which counts beside it."""
    rate = '[[roles.releaser.rate]]\nhost = "pypi.org"\nconnections = {}\nevery = "{}"\n'
    for mine, every, left in (
        (30, "minute", [(30, "minute")]),
        (90, "minute", [(60, "minute")]),
        (30, "hour", [(60, "minute"), (30, "hour")]),
    ):
        text = EVERYTHING.replace("[principals]", rate.format(mine, every) + "[principals]")
        found = rights(caller(workflow="release"), text)
        assert [(each.connections, each.every) for each in found.rates] == left


def test_a_tool_that_may_be_lifted_stays_as_narrow_as_the_role_that_has_it() -> None:
    """A yes gives what one role lacks, not what another takes away; the control is a lift that only one of them has."""
    lift = '[[roles.{}.lift]]\nwhat = "tool"\n'
    text = EVERYTHING.replace('tools = ["run_python"]', 'tools = ["fetch_url"]')
    text = text.replace("[principals]", lift.format("analyst") + lift.format("releaser") + "[principals]")
    found = rights(caller(workflow="release"), text)
    assert not found.profiles
    assert found.beyond["run_python"].limits.wall_seconds == 20
    assert found.beyond["search_workspace"] == PROFILES["search_workspace"]
    assert rights(caller(workflow="release"), text.replace(lift.format("releaser"), "")).beyond == {}


def test_roles_that_name_different_workspaces_leave_none() -> None:
    """Neither is given away; the control is one of them that names none."""
    text = EVERYTHING.replace("[roles.releaser]", '[roles.releaser]\nworkspace = "/srv/release"')
    both = Roles(policy(text), PROFILES, SERVED, {"/srv/support": SUPPORT, "/srv/release": Path("/srv/release")})
    assert both(caller(workflow="release")).workspace is None
    assert both(caller()).workspace == SUPPORT
    assert rights(caller(workflow="release")).workspace == SUPPORT
    assert rights(caller("token:other", roles=("releaser",))).workspace == SERVED


def test_what_each_role_leaves_is_worked_out_alone_and_with_each_workflow() -> None:
    """What is checked on start is all that a caller can have."""
    every = Roles(policy(), PROFILES, SERVED, {"/srv/support": SUPPORT}).all()
    assert [each.role for each in every] == ["analyst", "releaser", "analyst+releaser", "releaser"]


def test_rights_are_worked_out_once() -> None:
    """One object for a role; its key, by which what is shown is remembered, is another under another policy."""
    wider = EVERYTHING.replace("wall_seconds = 20", "wall_seconds = 25")
    assert rights(caller()).key == rights(caller("token:other")).key
    assert rights(caller()).key != rights(caller(), wider).key
    roles = Roles(policy(), PROFILES, SERVED, {"/srv/support": SUPPORT})
    assert roles(caller()) is roles(caller())
    assert roles(caller("oauth:https://id.example#anna")) is roles(caller())


def test_the_rights_of_so_many_callers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OAuth there may be any number, and none of them takes memory for ever."""
    monkeypatch.setattr("glovebox_server.core.rights.MAX_CALLERS", 10)
    roles = Roles(policy(), PROFILES, SERVED, {"/srv/support": SUPPORT})
    for number in range(100):
        roles(caller(f"oauth:https://id.example#{number}"))
    assert roles._of_caller.cache_info().currsize == 10


def _settings(place: Path) -> Settings:
    (place / "config").mkdir(exist_ok=True)
    return Settings(profiles_dir=place / "config" / "profiles", state_dir=place / "state", data_dir=place / "data")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a server whose environment counts as built."""
    found = environments.load("default", environments.SHIPPED)
    monkeypatch.setattr("glovebox_server.startup.required", lambda _, profiles: dict.fromkeys(profiles, found))
    return _settings(tmp_path)


PLAIN = """\
version = 1
default = "one"
[roles.one]
tools = ["run_python"]
[[example]]
principal = "token:a"
call = { tool = "fetch_url", arguments = { url = "https://a.org" } }
expect = "deny"
"""


def test_without_a_policy_everybody_has_what_the_profiles_say(settings: Settings) -> None:
    """One object for all, no role, no digest."""
    found = governed(settings, PROFILES, Workspace(path=SERVED))
    assert (found.policy, found.digest, policy_file(settings)) == (None, None, None)
    everybody = found.rights_of(caller())
    assert everybody is found.rights_of(caller("local:0"))
    assert everybody == Rights(profiles=PROFILES, workspace=SERVED)


def test_a_policy_beside_the_profiles_is_in_force(settings: Settings, tmp_path: Path) -> None:
    """So is one that was named; a name that leads nowhere is an error, and so is a link to nowhere beside them."""
    beside = tmp_path / "config" / "policy.toml"
    beside.write_text(PLAIN)
    found = governed(settings, PROFILES, Workspace(path=SERVED))
    assert found.rights_of(caller()).role == "one"
    assert found.digest == digest(policy(PLAIN))
    for wrong in (settings.model_copy(update={"policy": tmp_path / "none.toml"}), settings):
        if wrong is settings:
            beside.unlink()
            beside.symlink_to("nowhere")
        with pytest.raises(ProfileError):
            governed(wrong, PROFILES, Workspace(path=SERVED))


def test_a_roles_workspace_is_checked_as_one_that_is_named(settings: Settings, tmp_path: Path) -> None:
    """Not the server's own directories, nothing that is no directory; the control is a folder beside them."""
    beside = tmp_path / "config" / "policy.toml"
    (tmp_path / "state").mkdir()
    (tmp_path / "files").mkdir()

    def named(place: Path) -> Rights:
        beside.write_text(PLAIN.replace("[roles.one]", f'[roles.one]\nworkspace = "{place}"'))
        return governed(settings, PROFILES, Workspace(path=SERVED)).rights_of(caller())

    assert named(tmp_path / "files").workspace == tmp_path / "files"
    with pytest.raises(MisnamedError, match=r"policy\.toml: roles\.one\.workspace: .* server's state directory"):
        named(tmp_path / "state")
    with pytest.raises(ProfileError, match=r"roles\.one\.workspace: .*none is not a directory"):
        named(tmp_path / "none")


def test_a_workspace_that_cannot_be_looked_at_is_a_mistake_with_its_key(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no traceback."""

    def closed(*_: object) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("glovebox_server.startup.workspace.named", closed)
    text = PLAIN.replace("[roles.one]", f'[roles.one]\nworkspace = "{tmp_path}"')
    (tmp_path / "config" / "policy.toml").write_text(text)
    with pytest.raises(ProfileError, match=r"roles\.one\.workspace: cannot be used: Permission denied"):
        governed(settings, PROFILES, Workspace(path=SERVED))


def test_each_role_needs_an_environment_that_is_built(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each role's narrowed profiles are asked about, with those of workflows."""
    asked: list[list[str]] = []

    def built(_settings: Settings, profiles: ProfileSet) -> dict[str, str]:
        asked.append([tool for tool, _ in profiles.items()])
        return {}

    monkeypatch.setattr("glovebox_server.startup.required", built)
    (tmp_path / "config" / "policy.toml").write_text(PLAIN)
    governed(settings, PROFILES, Workspace(path=SERVED))
    assert asked == [["run_python"]]


def test_an_unknown_watch_rule_is_a_mistake(settings: Settings, tmp_path: Path) -> None:
    """With the nearest; the control is its right name."""
    beside = tmp_path / "config" / "policy.toml"
    beside.write_text(PLAIN.replace("[roles.one]", '[watch]\ndenial = "stop"\n[roles.one]'))
    with pytest.raises(ProfileError, match=r'no watch rule "denial".*nearest is "denials"'):
        governed(settings, PROFILES, Workspace(path=None))
    beside.write_text(PLAIN.replace("[roles.one]", '[watch]\ndenials = "stop"\n[roles.one]'))
    assert governed(settings, PROFILES, Workspace(path=None)).policy


@pytest.mark.parametrize(
    ("who", "tool", "answer"),
    [
        ('principal = "oauth:https://id#a"\nscopes = ["other"]', "run_python", ("allow", "allow")),
        ('principal = "oauth:https://id#a"\nscopes = ["read"]', "run_python", ("deny", "role.tools")),
        ('principal = "token:a"\nworkflow = "nightly"', "run_python", ("deny", "role.tools")),
        ('principal = "token:r"', "list_workspace_files", ("allow", "allow")),
        ('principal = "token:r"\nworkflow = "nightly"', "list_workspace_files", ("deny", "workspace.missing")),
        ('principal = "token:l"', "run_python", ("ask", "lift.tool")),
    ],
)
def test_an_example_is_decided_with_its_scopes_workflow_workspace_and_what_may_be_lifted(
    settings: Settings, tmp_path: Path, who: str, tool: str, answer: tuple[str, str]
) -> None:
    """As a call of that caller would be; the control is the opposite expectation."""
    roles = (
        f'[roles.reader]\ntools = ["list_workspace_files"]\nworkspace = "{tmp_path}/a"\n'
        f'[roles.nightly]\ntools = ["list_workspace_files"]\nworkspace = "{tmp_path}/b"\n'
        '[roles.lifted]\ntools = ["list_workspace_files"]\n[[roles.lifted.lift]]\nwhat = "tool"\n'
        '[principals]\n"token:r" = "reader"\n"token:l" = "lifted"\n'
        '[scopes]\nread = "reader"\n[workflows]\nnightly = "nightly"\n'
    )
    expect, rule = answer
    arguments = 'code = "1"' if tool == "run_python" else ""
    example = f'[[example]]\n{who}\ncall = {{ tool = "{tool}", arguments = {{ {arguments} }} }}\n'
    for name in "ab":
        (tmp_path / name).mkdir()
    beside, text = tmp_path / "config" / "policy.toml", PLAIN.replace("[[example]]", f"{roles}[[example]]")
    beside.write_text(f'{text}{example}expect = "{expect}"\nrule = "{rule}"\n')
    assert governed(settings, PROFILES, Workspace(path=SERVED)).policy
    other = "deny" if expect == "allow" else "allow"
    beside.write_text(f'{text}{example}expect = "{other}"\n')
    with pytest.raises(ProfileError, match=f"expects {other}, but the policy answers {expect} by {rule}"):
        governed(settings, PROFILES, Workspace(path=SERVED))


def test_the_example_policy_is_in_force_as_it_is_shipped(settings: Settings) -> None:
    """Its examples hold, and its roles are what its comments say."""
    example = settings.model_copy(update={"policy": Path(__file__).parents[2] / "examples" / "policy.toml"})
    found = governed(example, PROFILES, Workspace(path=SERVED))
    assert found.policy is not None
    assert len(found.policy.example) >= 4
    assert "run_python" not in found.rights_of(caller("token:reader")).profiles
    assert found.rights_of(caller("local:0", workflow="release")).role == "analyst+careful"
    assert found.rights_of(caller("token:nobody")).denial is not None


@pytest.mark.parametrize(
    ("call", "expect", "rule"),
    [
        ('{ tool = "run_python", arguments = { code = "1" } }', "allow", "allow"),
        ('{ tool = "run_python", arguments = { cod = "1" } }', "deny", "arguments"),
        ('{ tool = "run_python", arguments = { code = "1", timeout_seconds = 31 } }', "deny", "limits.wall_seconds"),
        ('{ tool = "fetch_url", arguments = { url = "https://pypi.org/simple/x" } }', "deny", "role.tools"),
    ],
)
def test_examples_are_decided_as_calls_are(
    settings: Settings, tmp_path: Path, call: str, expect: str, rule: str
) -> None:
    """By the real decision, under the role's narrowed profile; the control is another expectation, which is named."""
    example = f'[[example]]\nprincipal = "token:a"\ncall = {call}\nexpect = "{expect}"\nrule = "{rule}"\n'
    beside = tmp_path / "config" / "policy.toml"
    beside.write_text(PLAIN + example)
    assert governed(settings, PROFILES, Workspace(path=None)).policy
    beside.write_text(PLAIN + example.replace(f'rule = "{rule}"', 'rule = "other"'))
    with pytest.raises(ProfileError, match=rf"expects {expect} by other, but the policy answers {expect} by {rule}"):
        governed(settings, PROFILES, Workspace(path=None))


def test_keys_in_scope_are_those_of_the_tools_that_a_caller_may_get() -> None:
    """Of its profiles, and of those that a yes would give it; the controls are other roles."""
    network = PROFILES["fetch_url"].network.model_copy(update={"mode": "egress", "credential": (KEY,)})
    fetch = PROFILES["fetch_url"].model_copy(update={"network": network})
    profiles = PROFILES.with_narrower({**PROFILES, "fetch_url": fetch})
    lift = '[[roles.analyst.lift]]\nwhat = "tool"\n'
    for text, credentials in ((EVERYTHING, ()), (EVERYTHING + lift, (KEY,))):
        roles = Roles(policy(text), profiles, SERVED, {"/srv/support": SUPPORT})
        assert roles(caller()).credentials == credentials
    assert Rights(profiles=profiles, workspace=None).credentials == (KEY,)
