"""What a policy may say, and its closed defaults."""

import pytest
from pydantic import ValidationError
from tests.fixtures.policy_texts import EVERYTHING, policy

from glovebox_profiles.order import DIMENSIONS
from glovebox_profiles.policy.model import Approval, Budget, Lift, Narrow, Policy, Role, digest, effective


def test_a_policy_reads_as_it_is_written() -> None:
    """Every part of the file, with its own values."""
    role = policy().roles["analyst"]
    assert role.tools == ("run_python", "read_workspace_file")
    assert (role.workspace, role.artifacts_mib, role.turns) == ("/srv/support", 256, 4)
    narrow = role.narrow["run_python"].model_dump(exclude_unset=True)
    assert narrow == {"limits": {"wall_seconds": 20, "memory": 256 << 20}}
    assert (role.budget[0].name, role.budget[0].calls, role.budget[0].cpu_seconds) == ("calls-an-hour", 100, None)
    assert (role.approval[0].by, role.lift[0].what, role.rate[0].host) == ("either", "host", "pypi.org")
    assert policy().workflows == {"release": "releaser"}
    assert policy().watch == {"denials": "slow"}


def test_every_default_is_the_closed_one() -> None:
    """A role that says nothing may call nothing; an approval that says little asks for every call, for it alone."""
    assert Role().tools == ()
    assert Policy(version=1).default is None
    asked = Approval(name="all")
    assert (asked.when, asked.tool, asked.reach, asked.quorum) == ("always", None, "call", 1)
    assert Lift(what="host").by == "operator"


def test_a_role_narrows_what_grants_or_bounds_and_nothing_else() -> None:
    """Each dimension of a profile is a key of ``narrow``; keys that only describe are none."""

    def keys(model: type, prefix: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            inner = field.annotation
            below = isinstance(inner, type) and hasattr(inner, "model_fields")
            found |= keys(inner, f"{prefix}{name}.") if below else {f"{prefix}{name}"}
        return found

    assert keys(Narrow) == {each.key for each in DIMENSIONS}


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        ("version = 1", "version = 2", ("version",), "should be 1"),
        ('"oauth:https://id.example#*"', '"*"', ("principals",), "a principal is"),
        ('"oauth:https://id.example#*"', '"oauth:*"', ("principals",), "names its issuer"),
        ('"token:support" = ', '"token:" = ', ("principals",), "nobody has this name"),
        ('"token:support" = ', '"token:a*b" = ', ("principals",), "a principal is"),
        ('"token:support" = ', '"token:s\u0443pport" = ', ("principals",), "nobody can have"),
        ('"token:support" = ', '"token:Support" = ', ("principals",), "nobody can have"),
        ('"token:support" = ', '"token:sup_*" = ', ("principals",), "nobody can have"),
        ('"token:support" = ', '"local:me" = ', ("principals",), "nobody can have"),
        ('"oauth:https://id.example#*"', '"oauth:https://id.example#a b"', ("principals",), "nobody can have"),
        ("calls = 100", "", ("roles", "analyst", "budget", 0), "at least one of"),
        ('every = "hour"', 'every = "run"', ("roles", "analyst", "budget", 0), "goes with per"),
        ("calls = 100", "calls = 0", ("roles", "analyst", "budget", 0, "calls"), "greater than or equal"),
        ('when = "always"', 'when = "longer_than"', ("roles", "analyst", "approval", 0), "seconds goes with"),
        ('when = "always"', "seconds = 5", ("roles", "analyst", "approval", 0), "seconds goes with"),
        ('by = "either"', 'by = "client"\nanother_principal = true', ("roles", "analyst", "approval", 0), "only the"),
        ("quorum = 1", "quorum = 2", ("",), ""),
        ('"/srv/support"', '"srv/support"', ("roles", "analyst", "workspace"), "absolute"),
        ('"/srv/support"', '"/srv/../etc"', ("roles", "analyst", "workspace"), "absolute"),
        ("turns = 4", "turns = 17", ("roles", "analyst", "turns"), "less than or equal to 16"),
        ('host = "pypi.org"', 'host = "*"', ("roles", "analyst", "rate", 0, "host"), "too much"),
        ('host = "pypi.org"', 'host = "127.0.0.1"', ("roles", "analyst", "rate", 0, "host"), "loopback"),
        ('"read_workspace_file"]', '"run_python"]', ("roles", "analyst", "tools"), "listed twice"),
        ("wall_seconds = 20", "wall_seconds = 0.5", ("roles", "analyst", "narrow", "run_python", "limits",
         "wall_seconds"), "greater than"),
    ],
)  # fmt: skip
def test_what_a_policy_cannot_say(old: str, new: str, where: tuple[str | int, ...], says: str) -> None:
    """Each mistake stands at its key. The control is the same text without it, which reads, and a quorum of two."""
    text = EVERYTHING.replace(old, new, 1)
    assert text != EVERYTHING
    if not says:
        assert policy(text).roles["analyst"].approval[0].quorum == 2
        return
    with pytest.raises(ValidationError) as caught:
        policy(text)
    first = caught.value.errors()[0]
    assert first["loc"][: len(where)] == where
    assert says in first["msg"]


def test_a_name_is_used_once_in_the_file() -> None:
    """Budgets and approvals are told apart by name, whoever has the role."""
    text = EVERYTHING + '[[roles.releaser.budget]]\nname = "calls-an-hour"\nper = "run"\nevery = "run"\ncalls = 1\n'
    with pytest.raises(ValidationError, match=r"'calls-an-hour' is listed twice"):
        policy(text)
    assert policy(text.replace('"calls-an-hour"\nper = "run"', '"calls-a-run"\nper = "run"'))


def test_the_digest_is_of_what_a_policy_means() -> None:
    """Comments, spelling and stated defaults do not change it; the order of roles and any value do."""
    same = EVERYTHING.replace('"256 MiB"', "268435456").replace("quorum = 1\n", "") + "# the end\n"
    assert digest(policy(same)) == digest(policy())
    assert digest(policy(EVERYTHING.replace("calls = 100", "calls = 101"))) != digest(policy())
    first, second = "version = 1\n[roles.a]\n[roles.b]\n", "version = 1\n[roles.b]\n[roles.a]\n"
    assert digest(policy(first)) != digest(policy(second))
    assert effective(policy())["roles"]["analyst"]["narrow"] == {
        "run_python": {"limits": {"wall_seconds": 20.0, "memory": 256 << 20}}
    }


def test_a_budget_is_data() -> None:
    """As the other modules build one."""
    assert Budget(name="a", per="run", every="run", calls=3).failures is None
