"""Every id in code, tests and pages has its sentence, and no sentence is left whose id nobody uses."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping

from tests import claims
from tests.repo.files import texts

INDEX = "docs/internals/ids.csv"
#: Where letters and a digit mean something else: other systems' names, bytes, what a fuzzer starts from, this test.
ELSEWHERE = (
    "docs/internals/comparison",
    "docs/internals/performance",
    "tests/fuzz/seeds/",
    "tests/repo/test_ids.py",
    INDEX,
)

_ATTACK = re.compile(r"(?<![\w.-])[EFIM][0-9]{1,2}(?![\w-])")
_IN_A_NAME = re.compile(r"\btest_([efim][0-9]{1,2})_")
_CLAIM = re.compile(r"\bGB-[A-Z]+-[0-9]+\b")


def used() -> Mapping[str, set[str]]:
    """Attacks and claims by id, each with the files that name it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, text in texts():
        if name.startswith(("tests/", "sandboxes/", "server/", "profiles/", "docs/")) and not name.startswith(
            ELSEWHERE
        ):
            for identity in (*_CLAIM.findall(text), *_ATTACK.findall(text), *map(str.upper, _IN_A_NAME.findall(text))):
                found[identity].add(name)
    return found


def test_every_id_is_in_the_index_and_none_is_dead() -> None:
    """Attacks are in docs/internals/ids.csv, claims in docs/operate/claims.csv."""
    header, *entries = csv.reader(io.StringIO(dict(texts())[INDEX]), strict=True)
    assert header == ["id", "about", "what happened"]
    defined = [identity for identity, _, _ in entries]
    assert len(defined) == len(set(defined)) > 40
    assert [identity for identity in defined if not _ATTACK.fullmatch(identity)] == []
    assert [identity for identity, _, sentence in entries if not sentence.endswith(".")] == []
    known = {*defined, *(each.id for each in claims.sentences())}
    made_up = {"GB-FILE-99"}  # in the test of the claims themselves
    uses = used()
    assert {identity: names for identity, names in uses.items() if identity not in known | made_up} == {}
    assert known - uses.keys() == set()
