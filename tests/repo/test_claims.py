"""No security sentence without tests, and no attack without a sentence."""

from pathlib import Path

import pytest
from tests import claims
from tests.conformance.whole_calls import case as call

from glovebox_sandboxes.conformance import case

CASES = (*case.load(), *call.load())
ESCAPE = sorted(path.name for path in (claims.ROOT / "tests/escape").glob("test_*.py"))
README = (claims.ROOT / "README.md").read_text()
PAGE = (claims.ROOT / "docs/operate/threat-model.md").read_text()
TABLE = claims.TABLE.read_text()


def test_every_sentence_has_tests_and_every_attack_a_sentence() -> None:
    """docs/operate/claims.csv, README.md, tests/escape and the conformance cases fit together."""
    found = claims.sentences()
    assert len(found) > 50
    assert claims.problems(found, CASES, ESCAPE, README) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (",program,Escape,cases", ",program,Fame,cases", "GB-FILE-1: 'Fame' is no severity"),
        (",program,Escape,cases", ",hacker,Escape,cases", "GB-FILE-1: 'hacker' is no attacker"),
        (",program,Escape,cases", ",program,,cases", "GB-FILE-1: says no severity"),
        ("test_workspace_paths.py", "soon", "tests/escape/test_workspace_paths.py: no sentence names it"),
        (",test_tokens.py", ",to be written", "GB-MCP-5: has no test"),
        (",test_tokens.py", ",test_toknes.py", "GB-MCP-5: there is no test_toknes.py"),
        ("::test_each_redirect_is_decided_again", "::test_none", "GB-NET-6: test_egress_network.py has no test_none"),
        ("\nGB-FILE-1,", "\nGB-FILE-99,", "case workspace-write: proves GB-FILE-1, which is no sentence"),
        ("\nGB-FILE-2,", "\nGB-FILE-1,", "GB-FILE-1: is given twice"),
        (",program,HostLeak,cases; ", ",program,HostLeak,", "GB-FILE-2: does not say cases, and some prove it"),
    ],
)
def test_what_does_not_fit_is_named(old: str, new: str, problem: str) -> None:
    """The control: each way to break the table is found."""
    assert old in TABLE
    found = claims.sentences(TABLE.replace(old, new, 1))
    assert problem in claims.problems(found, CASES, ESCAPE, README)


def test_a_row_that_is_no_claim_is_refused() -> None:
    """Else a claim could be lost by a typo; here its id is none."""
    with pytest.raises(ValueError, match="a row is not"):
        claims.sentences(TABLE.replace("\nGB-FILE-1,", "\nGB-FILE1,"))


def test_the_page_explains_every_word_of_the_table() -> None:
    """Attackers and severities are defined on the page, which names the table."""
    words = {word for claim in claims.sentences() for word in (*claim.attackers, *claim.severities)}
    assert [word for word in words if f"**{word}**" not in PAGE] == []
    assert "](claims.csv)" in PAGE


def test_a_sentence_of_the_readme_without_an_id_is_named() -> None:
    """Each paragraph of "What it does" is held by sentences of the threat model."""
    text = README.replace("## What it does\n", "## What it does\n\nIt is safe.\n")
    wrong = claims.problems(claims.sentences(), CASES, ESCAPE, text)
    assert wrong == ["README.md: no sentence stands behind 'It is safe.'"]


def test_test_files_have_names_of_their_own() -> None:
    """Two of the same name could not be named in one word, nor collected together."""
    names = [path.name for path in Path(claims.ROOT / "tests").rglob("test_*.py")]
    assert [name for name in names if names.count(name) > 1] == []
