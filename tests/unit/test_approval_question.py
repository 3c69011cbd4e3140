"""What a yes is bound to."""

from dataclasses import fields, replace

import pytest

from glovebox_server.guards.approvals.question import QuestionSubject, canonical

SUBJECT = QuestionSubject(
    principal="local:1000",
    run="r_1",
    tool="run_python",
    arguments=canonical({"code": "print(1)"}),
    profile_digest="sha256:a",
    policy_digest="sha256:b",
    inputs=(("artifact://1", "aa"),),
    workspace="1:2:sha256:c",
    environment="sha256:d",
    rules=("approval.programs",),
)


@pytest.mark.parametrize("name", [field.name for field in fields(QuestionSubject)])
def test_every_part_of_the_subject_changes_its_digest(name: str) -> None:
    """A yes is bound to all of it; the control is that the same subject has the same digest."""
    other = {"inputs": (), "rules": ("approval.hosts",), "lifted": "host"}.get(name, "other")
    assert replace(SUBJECT, **{name: other}).digest != SUBJECT.digest  # type: ignore[arg-type]  # each its own type
    assert replace(SUBJECT).digest == SUBJECT.digest


def test_arguments_have_one_spelling() -> None:
    """The order of keys says nothing, and is not part of what is approved."""
    assert canonical({"b": 1, "a": "x"}) == canonical({"a": "x", "b": 1}) == '{"a":"x","b":1}'


def test_text_that_is_no_unicode_is_not_approved_as_if_it_were_its_escape() -> None:
    """The log writes half a surrogate pair as its escape; a yes to one program would be a yes to two."""
    assert canonical({"code": r"'\ud800'"})
    with pytest.raises(ValueError, match="non-UTF-8"):
        canonical({"code": "'\ud800'"})
