"""What ``glovebox policy`` says: explanations and comparisons in plain words, their exit codes and their JSON."""

import json
import subprocess  # noqa: TID251 - a server's own process
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.fixtures.policy_texts import EVERYTHING, policy

from glovebox_profiles.explain import render
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.policy.diff import diff
from glovebox_profiles.policy.explain import explain
from glovebox_profiles.policy.model import Promote, effective
from glovebox_profiles.policy.rights import combine_roles
from glovebox_server.cli.main import main
from glovebox_server.guards.watch.watch import RULES

PROFILES = load([SHIPPED], check_example=None)
GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: object) -> Result:
    """One command."""
    return CliRunner().invoke(main, ["policy", *map(str, arguments)])


def written(place: Path, text: str, name: str = "policy.toml") -> Path:
    """A policy in a file that nobody else can write, of which the folder exists."""
    path = place / name
    text = text.replace("/srv/support", str(place))
    path.write_text(text.replace('expect = "ask"\nrule = "approval.programs"', 'expect = "deny"\nrule = "role.tools"'))
    return path


READABLE = EVERYTHING.replace(
    'tool = "run_python", arguments = { code = "1" }', 'tool = "fetch_url", arguments = { url = "https://a.org" }'
)


MORE = """\
[[roles.releaser.approval]]
name = "four-eyes"
when = "longer_than"
seconds = 10
by = "operator"
another_principal = true
quorum = 2
reach = "run"
[[roles.releaser.budget]]
name = "a-run"
per = "run"
every = "run"
disclosed_bytes = "1 MiB"
cpu_seconds = 90
failures = 1
"""


def test_an_explanation_says_everything_that_a_role_does() -> None:
    """Tools, workspace, limits, budgets, who is asked, what may be lifted: the golden text."""
    text = READABLE + MORE
    given = policy(text)
    told = []
    for names in (("analyst",), ("analyst", "releaser")):
        rights = combine_roles(given, names, PROFILES)
        told.append(render(explain(rights, PROFILES, principal="token:support", served="the server's")))
    assert "\n\n---\n\n".join(told) + "\n" == (GOLDEN / "policy-explained.txt").read_text()


CHANGES = (
    ("turns = 4", "turns = 5"),
    ("artifacts_mib = 256", "artifacts_mib = 128"),
    ('"/srv/support"', '"/srv/support/eu"'),
    ('tools = ["run_python"]', 'tools = ["run_python", "fetch_url"]'),
    ("wall_seconds = 20", "wall_seconds = 25"),
    ('memory = "256 MiB"', 'memory = "128 MiB"'),
    ("calls = 100", "calls = 99\nfailures = 3"),
    ("quorum = 1", "quorum = 2"),
    ('by = "either"', 'by = "client"'),
    ('when = "always"', 'when = "leaves"'),
    ('what = "host"\nby = "operator"', 'what = "host"\nby = "either"'),
    ("connections = 60", "connections = 61"),
    ('default = "analyst"\n', ""),
    ('"token:support" = "analyst"', '"token:support" = "releaser"'),
    ('"oauth:https://id.example#*" = "analyst"\n', ""),
    ('release = "releaser"', 'release = "analyst"'),
    ('"glovebox:analyst" = "analyst"', '"glovebox:analyst" = "analyst"\n"glovebox:release" = "releaser"'),
    ('denials = "slow"', 'denials = "stop"'),
    (
        "[[roles.analyst.rate]]",
        '[[roles.analyst.budget]]\nname = "more"\nper = "run"\nevery = "run"\ncalls = 1\n[[roles.analyst.rate]]',
    ),
    ('[roles.releaser]\ntools = ["run_python"]', '[roles.releaser]\ntools = ["run_python"]\n[roles.other]'),
    ('expect = "ask"', 'expect = "deny"'),
)  # each alone, in the order of the golden file


def test_each_change_is_judged_and_said() -> None:
    """Both ways, one change at a time: the golden text. What narrows one way widens the other."""
    told = []
    for old, new in CHANGES:
        changed = EVERYTHING.replace(old, new, 1)
        told.append(f"# {old!r} -> {new!r}")
        for before, after in ((EVERYTHING, changed), (changed, EVERYTHING)):
            found = diff(policy(before), policy(after), PROFILES)
            told += [f"{each.direction:<9} {each.key}: {each.sentence}" for each in found] or ["nothing"]
            told.append("")
    assert "\n".join(told) == (GOLDEN / "policy-compared.txt").read_text()


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [
        ("", 'denials = "slow"', "narrowing"),
        ('denials = "slow"', "", "widening"),
        ("", 'denials = "record"', "neutral"),
        ('denials = "off"', "", "narrowing"),
        ("", 'canary = "record"', "widening"),
        ("", 'canary = "stop"', "neutral"),
    ],
)
def test_a_watch_rule_is_judged_by_what_it_does_when_nothing_is_said(before: str, after: str, direction: str) -> None:
    """By the rules' own actions: the canary's is to stop, the denials' to record."""
    a, b = (policy(EVERYTHING.replace('denials = "slow"', each)) for each in (before, after))
    (change,) = diff(a, b, PROFILES, RULES)
    assert change.direction == direction


def test_a_policy_that_is_right_is_checked_with_its_digest(tmp_path: Path) -> None:
    """As text and as JSON; what is wrong has line, key and nearest, and exit code 2."""
    path = written(tmp_path, READABLE)
    found = run("check", "--policy", path)
    assert (found.exit_code, found.stdout.splitlines()[0]) == (0, f"{path}: 2 roles, 1 example, no error.")
    told = json.loads(run("check", path, "--json").stdout)
    assert (told["roles"], told["examples"], told["errors"]) == (["analyst", "releaser"], 1, [])
    assert told["digest"] in found.stdout
    elsewhere = written(tmp_path, READABLE.replace("/srv/support", "/nowhere"), "elsewhere.toml")
    assert run("check", elsewhere).exit_code == 0  # the control: it may be for another machine
    found = run("check", "--policy", elsewhere)
    assert (found.exit_code, "/nowhere is not a directory. Make it" in found.stderr) == (2, True)
    wrong = written(tmp_path, READABLE.replace('default = "analyst"', 'default = "analist"'), "wrong.toml")
    found = run("check", wrong)
    assert found.exit_code == 2
    assert found.stderr.startswith(f'{wrong}:2: default: there is no role "analist". The nearest is "analyst".')
    found = run("check", wrong, "--json")
    assert found.exit_code == 2
    assert json.loads(found.stdout)["errors"][0]["line"] == 2


def test_a_principal_is_explained_by_its_roles(tmp_path: Path) -> None:
    """With its workflow, its token's role and its scopes; who has no role is told so."""
    path = written(tmp_path, READABLE.replace('default = "analyst"\n', ""))
    assert "is in the role analyst.\n" in run("explain", "token:support", "--policy", path).stdout
    told = json.loads(run("explain", "token:support", "--workflow", "release", "--json", "--policy", path).stdout)
    assert told["roles"] == ["analyst", "releaser"]
    assert told["sections"][0]["title"] == "In which role"
    assert told["sections"][0]["sentences"][0] == "token:support is in the roles analyst, releaser."
    told = json.loads(run("explain", "token:x", "--role", "releaser", "--json", "--policy", path).stdout)
    assert told["roles"] == ["releaser"]
    told = json.loads(run("explain", "token:x", "--scope", "glovebox:analyst", "--json", "--policy", path).stdout)
    assert told["roles"] == ["analyst"]
    state = ("--state-dir", tmp_path / "state", "--policy", path)
    made = CliRunner().invoke(main, [*map(str, ("token", "create", "x", "--role", "analyst", *state))])
    assert made.exit_code == 0, made.output
    assert json.loads(run("explain", "token:x", "--json", *state).stdout)["roles"] == ["analyst"]
    found = run("explain", "token:x", "--policy", path)
    assert found.stdout.startswith(
        "token:x may call nothing (policy.principal): The operator's policy gives you no role"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("token:a", "--workflow", "relase"), 'there is no workflow "relase". The nearest is "release".'),
        (("token:a", "--role", "analist"), 'there is no role "analist". The nearest is "analyst".'),
        (("token:a", "--scope", "x"), 'there is no scope "x". There are: glovebox:analyst.'),
        (("tokn:a",), "'tokn:a' is no principal"),
        (("token:*",), "'token:*' is no principal"),
    ],
)
def test_a_name_that_is_not_there_is_an_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """Otherwise somebody would read what another may do."""
    found = run("explain", *arguments, "--policy", written(tmp_path, READABLE))
    assert found.exit_code == 2
    assert says in found.stderr


def test_without_a_policy_there_is_nothing_to_explain(tmp_path: Path) -> None:
    """Said with the place where one would be read."""
    found = run("explain", "token:a", "--profiles-dir", tmp_path / "profiles")
    assert found.exit_code == 2
    assert "everybody has what the profiles say" in found.stderr
    assert str(tmp_path / "policy.toml") in found.stderr


def test_a_widening_ends_with_1(tmp_path: Path) -> None:
    """And a narrowing with 0, as text and as JSON."""
    a = written(tmp_path, READABLE, "a.toml")
    b = written(tmp_path, READABLE.replace("turns = 4", "turns = 5"), "b.toml")
    found = run("diff", a, b)
    assert (found.exit_code, found.stdout.splitlines()[-1]) == (1, "Something widens.")
    assert "widening   roles.analyst.turns  Calls at a time: 4 → 5." in found.stdout
    found = run("diff", b, a, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["widening"] is False
    assert run("diff", a, tmp_path).exit_code == 2


def test_a_folder_to_promote_into_widens_and_leaves_the_digest_of_others_as_it_was() -> None:
    """A new or another folder widens, one less narrows; a policy that names none means what it did before it could."""
    without = policy()
    assert "promote" not in effective(without)
    table = '[promote]\ninto = { reports = "/srv/reports" }\n\n[[example]]'
    with_one = policy(EVERYTHING.replace("[[example]]", table, 1))
    other = with_one.model_copy(update={"promote": Promote(into={"reports": "/srv/other"})})
    assert effective(with_one)["promote"] == {"into": {"reports": "/srv/reports"}}
    directions = [
        [(each.key, each.direction) for each in diff(a, b, {})]
        for a, b in ((without, with_one), (with_one, other), (other, without))
    ]
    key = "promote.into.reports"
    assert directions == [[(key, "widening")], [(key, "widening")], [(key, "narrowing")]]


@pytest.mark.parametrize("conflict", [True, False])
def test_scopes_in_another_order_than_their_roles_are_warned_of(conflict: bool, tmp_path: Path) -> None:
    """Both are named, and the role that counts; checking fails for it no more than a server does."""
    scopes = ('"a:wide" = "releaser"', '"b:narrow" = "analyst"')
    ordered = "\n".join(scopes if conflict else reversed(scopes))
    path = written(tmp_path, READABLE.replace('"glovebox:analyst" = "analyst"', ordered))
    found = run("check", "--policy", path)
    assert found.exit_code == 0, found.output
    warning = '[scopes] has "a:wide" before "b:narrow", but a token with both has the role analyst'
    assert (f"Warning: {warning}" in found.stdout) is conflict
    assert len(json.loads(run("check", path, "--json").stdout)["warnings"]) == conflict


CONFLICT = """\
version = 1
[roles.analyst]
tools = ["read_workspace_file"]
[roles.releaser]
tools = ["list_workspace_files"]
[scopes]
"b" = "releaser"
"a" = "analyst"
[[example]]
principal = "token:one"
call = { tool = "run_python", arguments = { code = "1" } }
expect = "deny"
"""


@pytest.mark.long
def test_a_server_warns_of_such_scopes_when_it_starts(tmp_path: Path) -> None:
    """On standard error, for the operator; over stdio the protocol has standard output alone."""
    words = ["serve", "--policy", str(written(tmp_path, CONFLICT)), "--state-dir", str(tmp_path / "state")]
    command = [sys.executable, "-m", "glovebox_server", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    assert 'Policy: [scopes] has "b" before "a"' in done.stderr, done.stderr
    assert done.stdout == ""
