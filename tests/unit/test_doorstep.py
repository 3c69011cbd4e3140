"""What is typed on a bare machine is what the README says, whole commands with their exit codes."""

import pytest
from tests.tools.doorstep import REMEDY, ROOT, TRACEBACK, Command, commands, problem

README = """# It

<!-- run -->
```text
not this
```

<!-- run -->
```sh
git clone <address> it && cd it
make demo          # what it's for
# A remark.

it call --args '{"code": "a
b"}'
it refused \\
    --twice   # exit 3: refused
make test
```

<!-- not run: needs a key -->
```sh
nor this
```

<!-- run -->
```sh
it last
```
"""


def test_commands_are_whole_and_know_their_exit_code() -> None:
    found = list(commands(README))
    assert [(each.text.split("#")[0].strip(), each.code) for each in found] == [
        ("make demo", 0),
        ('it call --args \'{"code": "a\nb"}\'', 0),
        ("it refused \\\n    --twice", 3),
        ("it last", 0),
    ]


@pytest.mark.parametrize(
    ("readme", "reason"), [("# It\n", "no block"), ("<!-- run -->\n```sh\nit 'never\n```\n", "ends within")]
)
def test_a_readme_that_cannot_be_typed_is_an_error(readme: str, reason: str) -> None:
    """Nothing to type must not look like everything typed."""
    with pytest.raises(ValueError, match=reason):
        list(commands(readme))


def test_the_readme_begins_with_the_demo() -> None:
    first = next(commands((ROOT / "README.md").read_text()))
    assert first.text.startswith("make demo")


@pytest.mark.parametrize(
    ("code", "output", "wrong"),
    [
        (3, "Refused.", ""),
        (0, "Done.", "exited with 0, not 3"),
        (3, " \n", "without a word"),
        (3, f"{TRACEBACK}:\n", "traceback"),
    ],
)
def test_a_command_is_judged_by_code_and_words(code: int, output: str, wrong: str) -> None:
    assert problem(Command("it", 1), 1, f"{TRACEBACK}:\n") == ""
    found = problem(Command("it", 3), code, output)
    assert wrong in found
    assert bool(wrong) == bool(found)


def test_the_remedy_is_what_bootstrap_prints() -> None:
    printed = "✗ Something is missing\n  Run:  sudo apt-get install python3-venv bubblewrap\n  then\n"
    found = REMEDY.search(printed)
    assert found is not None
    assert found[1] == "apt-get install python3-venv bubblewrap"
