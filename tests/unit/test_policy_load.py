"""A policy that loads, and the errors of those that do not: file, line, key, problem and nearest."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.policy_texts import EVERYTHING, policy

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_profiles.load.loader import load as load_profiles
from glovebox_profiles.load.reading import ANY, valid_keys
from glovebox_profiles.model import Effect
from glovebox_profiles.policy.load import PAGE, load, parse
from glovebox_profiles.policy.model import Policy

KNOWN = (load_profiles([SHIPPED], check_example=None), ("denials", "canary"))


def asks(policy: Policy) -> list[tuple[Effect, str]]:
    """Answer as the policy of the tests must."""
    return [("ask", "approval.programs") for _ in policy.example]


def written(directory: Path, text: str = EVERYTHING) -> Path:
    """A policy in a file."""
    path = directory / "policy.toml"
    path.write_text(text)
    return path


def refused(path: Path) -> ProfileError:
    """Load what must not load."""
    with pytest.raises(ProfileError) as caught:
        load(path, *KNOWN, asks)
    return caught.value


def test_a_policy_loads_as_it_is_written(tmp_path: Path) -> None:
    """The control of all that follows."""
    assert load(written(tmp_path), *KNOWN, asks) == policy()


@pytest.mark.parametrize(
    ("change", "key", "problem", "hint"),
    [
        (('default = "analyst"', 'default = "analist"'), "default", 'no role "analist"', 'nearest is "analyst"'),
        (('#*" = "analyst"', '#*" = "x"'), "principals.oauth:https://id.example#*", 'no role "x"', "analyst, releaser"),
        (('release = "releaser"', 'release = "released"'), "workflows.release", "no role", '"releaser"'),
        (
            ('"glovebox:analyst" = "analyst"', '"glovebox:analyst" = "anlyst"'), "scopes.glovebox:analyst",
            "no",
            "analyst",
        ),
        (('"read_workspace_file"]', '"read_file"]'), "roles.analyst.tools[1]", 'no tool "read_file"', "read_workspace"),
        (
            ("narrow.run_python]", "narrow.run_pyton]"), "roles.analyst.narrow.run_pyton",
            "no tool of this",
            "run_python",
        ),
        (
            ('tool = "run_python"\nwhen', 'tool = "fetch_url"\nwhen'), "roles.analyst.approval[0].tool",
            "no tool of",
            "are",
        ),
        (('denials = "slow"', 'denial = "slow"'), "watch.denial", 'no watch rule "denial"', 'nearest is "denials"'),
        (('denials = "slow"', 'denials = "slower"'), "watch.denials", "'slow'", "docs/operate/policy.md"),
        (("turns = 4", "turn = 4"), "roles.analyst.turn", "unknown key", '"roles.analyst.turns"'),
        (("calls = 100", "cals = 100"), "roles.analyst.budget[0].cals", "unknown key", '"roles.analyst.budget.calls"'),
        (('default = "analyst"', "[role.analyst]"), "role", "unknown key", '"roles"'),
        (
            ("wall_seconds = 20", "wall_secs = 20"), "roles.analyst.narrow.run_python.limits.wall_secs",
            "unknown key",
            "limits.wall_seconds",
        ),
        (("limits = {", "limit = {"), "roles.analyst.narrow.run_python.limit", "unknown key", "run_python.limits"),
        (
            ("limits = {", 'risk = "low"\nlimits = {'), "roles.analyst.narrow.run_python.risk",
            "unknown key",
            "isolation",
        ),
        (('"token:support" = ', '"support" = '), "principals.support", "a principal is", "policy.md"),
        (("version = 1\n", ""), "version", "required, and missing", "policy.md"),
        (("[principals]", "[principals]\n[watch]"), "", "Cannot declare ('watch',) twice", "toml.io"),
        (
            ("wall_seconds = 20", "wall_seconds = 40"), "roles.analyst.narrow.run_python.limits.wall_seconds",
            "would widen the profile of run_python, which a role cannot: Seconds of real time: 30 → 40",
            "A role only takes away",
        ),
        (
            ("limits = {", "network = { mode = 'egress', allow = [{ host = 'pypi.org' }] }\nlimits = {"),
            "roles.analyst.narrow.run_python.network.mode",
            "would widen",
            "only takes away",
        ),
        (
            ("limits = {", "network.mode = 'egress'\nlimits = {"), "roles.analyst.narrow.run_python.network.allow",
            "at least one host",
            "only takes away",
        ),
        (
            ("limits = {", "isolation = ['gvisor']\nlimits = {"), "roles.analyst.narrow.run_python.isolation",
            "would widen",
            "only takes away",
        ),
        (('tool = "run_python", arg', 'tool = "run_pythn", arg'), "example[0].call.tool", "no tool", "run_python"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_line_key_and_nearest(
    tmp_path: Path, change: tuple[str, str], key: str, problem: str, hint: str
) -> None:
    """The server does not start; the operator goes to the line and repairs it."""
    old, new = change
    assert old in EVERYTHING
    text = EVERYTHING.replace(old, new, 1)
    error = refused(written(tmp_path, text))
    assert (error.path, error.key) == (tmp_path / "policy.toml", key)
    assert problem in error.reason
    assert hint in error.fix
    at = text[: text.index(new)].count("\n") + 1
    assert error.line is not None
    assert at <= error.line <= at + new.count("\n") or "twice" in problem


def test_the_line_is_that_of_the_mistake(tmp_path: Path) -> None:
    """Also of a table within an array, and of what stands in one line with others."""
    text = EVERYTHING.replace("calls = 100", "calls = 0").replace('"run_python", "read_', '"run_python",\n"read_')
    line = text.splitlines().index("calls = 0") + 1
    assert refused(written(tmp_path, text)).line == line
    text = EVERYTHING.replace('"read_workspace_file"]', '\n"read_me"]')
    error = refused(written(tmp_path, text.replace('tool = "run_python", arg', 'tool = "run_pythn", arg')))
    assert error.line == text.splitlines().index('"read_me"]') + 1
    assert [item.key for item in error.more] == ["example[0].call.tool"]


@pytest.mark.parametrize(
    ("expect", "rule", "says"),
    [
        ("allow", "allow", "expects allow by allow, but the policy answers ask by approval.programs"),
        ("ask", "approval.others", "expects ask by approval.others, but the policy answers ask by approval.programs"),
    ],
)
def test_an_example_that_is_decided_otherwise_is_named(tmp_path: Path, expect: str, rule: str, says: str) -> None:
    """The file says what its writer believes; where it is not so, nothing starts."""
    text = EVERYTHING.replace('expect = "ask"', f'expect = "{expect}"').replace(
        'rule = "approval.p', f'rule = "{rule}"#'
    )
    error = refused(written(tmp_path, text))
    assert (error.key, error.reason) == ("example[0]", says)
    assert error.line == text.splitlines().index("[[example]]") + 1
    assert load(error.path, *KNOWN, None).example  # the control: for reading alone they are not decided


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.chmod(0o666), "writable"),
        (lambda path: path.parent.chmod(0o777), "writable"),
        (_linked, "a symbolic link"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (_fifo, "not a regular file"),
        (lambda path: path.write_bytes(b"version = 1 # \xe9"), "not UTF-8"),
        (lambda path: path.write_text("#" * (64 * 1024 + 1)), "larger than 64 KiB"),
    ],
)
def test_a_policy_that_somebody_else_could_have_written_is_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    """As for profiles: it decides who may do what."""
    path = written(tmp_path)
    assert load(path, *KNOWN, asks)
    spoil(path)
    assert says in refused(path).reason


def test_the_table_has_every_key_and_no_other() -> None:
    """docs/operate/policy-keys.csv; the keys of ``narrow`` are those of profiles, which have a table."""
    page = Path(__file__).parents[2] / PAGE
    with page.with_name("policy-keys.csv").open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table, strict=True))
    keys = [".".join(key) for key in valid_keys(Policy) if "narrow" not in key[:-1] and key[-1] != ANY]
    assert len(keys) > 50  # the control: they are found
    assert [row["key"] for row in rows] == keys
    assert [row["key"] for row in rows if not row["default"] or not row["meaning"].endswith(".")] == []
    assert "](policy-keys.csv)" in page.read_text()


def _outcome(data: bytes) -> Policy | None:
    try:
        return parse(data, Path("policy.toml"))[0]
    except ProfileError:
        return None


def test_a_policy_that_was_cut_short_is_refused_or_the_same_without_examples() -> None:
    """E3: what narrows a role, or gives somebody one that is narrower, cannot be lost without being missed."""
    whole = EVERYTHING.encode()
    policies = [_outcome(whole[:length]) for length in range(len(whole) + 1)]
    found = [each for each in policies if each is not None]
    assert found[-1] == policy()
    assert len(found) < 10
    assert all(each.model_copy(update={"example": ()}) == policy().model_copy(update={"example": ()}) for each in found)


@pytest.mark.parametrize("also", ["[watch]\n", '[workflows]\nrelease = "releaser"\n'])
def test_the_examples_stand_last(also: str) -> None:
    """Else a file could lose what follows them; the control is the same text with the two exchanged."""
    text = EVERYTHING.replace('[workflows]\nrelease = "releaser"\n', "").replace('[watch]\ndenials = "slow"\n', "")
    with pytest.raises(ProfileError, match=r"stands behind an example.* Put the examples last\.") as caught:
        parse((text + also).encode(), Path("policy.toml"))
    assert caught.value.line == text.count("\n") + 1
    assert parse(text.replace("[[example]]", f"{also}[[example]]").encode(), Path("policy.toml"))
    with pytest.raises(ProfileError, match=r"example: there is none.* End it with an \[\[example\]\]"):
        parse(text[: text.index("[[example]]")].encode(), Path("policy.toml"))


@given(st.binary(max_size=300), st.integers(0, len(EVERYTHING)))
def test_whatever_bytes_stand_in_a_policy_the_answer_is_a_policy_or_an_error(noise: bytes, at: int) -> None:
    """Never another exception, alone and in the middle of a good one."""
    _outcome(noise)
    whole = EVERYTHING.encode()
    _outcome(whole[:at] + noise + whole[at:])
