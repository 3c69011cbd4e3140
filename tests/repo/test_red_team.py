"""What is published of the red team with content, and of OWASP's list, is what there is."""

import csv
import re

from tests import claims
from tests.conformance.whole_calls import case as call
from tests.red_team import corpus, report

from glovebox_sandboxes.conformance import case

RISKS = {
    "ASI01": "Agent Goal Hijack",
    "ASI02": "Tool Misuse and Exploitation",
    "ASI03": "Identity and Privilege Abuse",
    "ASI04": "Agentic Supply Chain Vulnerabilities",
    "ASI05": "Unexpected Code Execution (RCE)",
    "ASI06": "Memory & Context Poisoning",
    "ASI07": "Insecure Inter-Agent Communication",
    "ASI08": "Cascading Failures",
    "ASI09": "Human-Agent Trust Exploitation",
    "ASI10": "Rogue Agents",
}
"""OWASP Top 10 for Agentic Applications 2026, version 1.0 (December 2025)."""
OWASP = claims.ROOT / "docs/operate/agentic-top-10.csv"


def test_there_are_enough_attacks_and_each_is_one_of_its_own() -> None:
    """At least 150, each with a canary that is in no other's file and an instruction."""
    families = corpus.families()
    attacks = [attack for family in families for attack in family.attacks]
    assert len(attacks) >= 150
    assert len({attack.canary for attack in attacks}) == len({attack.slug for attack in attacks}) == len(attacks)
    assert [family.name for family in families if len(family.attacks) < 4 or not family.source] == []
    assert {attack.read_by for attack in attacks} == set(corpus.READERS)


def test_every_attack_is_published_and_the_table_is_that_of_the_attacks() -> None:
    """docs/operate/red-team.csv has a line for each attack, and red-team-summary.csv their sums."""
    lines = report.read_csv()
    attacks = [attack.id for family in corpus.families() for attack in family.attacks]
    assert [f"{line[0]}/{line[1]}" for line in lines] == attacks
    assert report.as_csv(lines) == report.CSV.read_text()
    assert report.summary(lines) == report.SUMMARY.read_text()


def test_no_attack_is_published_as_leaving_by_another_way_than_the_shipped_profiles_name() -> None:
    """Under the shipped profiles to the allowed host at most; the control shows the others (they could)."""
    lines = report.read_csv()
    *tried, control = range(4, len(report.COLUMNS))
    for column in tried:
        assert {line[column] for line in lines} == {"", "pages"}, report.COLUMNS[column]
    assert sum("collector" in line[control] or "look-up" in line[control] for line in lines) > 150


def test_every_risk_of_owasps_list_has_controls_with_cases_and_its_gaps() -> None:
    """Each id in the table is a claim, a conformance case, or a family of the red team."""
    with OWASP.open(newline="") as table:
        _, *lines = csv.reader(table, strict=True)
    rows = {identity: (title, *rest) for identity, title, *rest in lines}
    assert len(rows) == len(lines)
    assert {identity: row[0] for identity, row in rows.items()} == RISKS
    sentences = {each.id for each in claims.sentences()}
    runnable = {one.id for one in (*case.load(), *call.load())} | {family.name for family in corpus.families()}
    wrong = []
    for identity, (_, controls, cases, gaps) in rows.items():
        named = set(re.findall(r"GB-[A-Z]+-[0-9]+", controls))
        tried = set(cases.split("; "))
        wrong += [f"{identity}: {name} is no claim" for name in named - sentences]
        wrong += [f"{identity}: {name} is no case" for name in tried - runnable]
        if not named or not tried or len(gaps) < 20:
            wrong.append(f"{identity}: says no claim, no case or no gap")
    assert wrong == []
