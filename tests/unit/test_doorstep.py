"""What is typed on a bare machine is what the README says; and the demo's first look says once what a host lacks."""

import importlib.util
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

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

<!-- run -->
```console
$ make demo
… well
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
    assert [each.shows for each in found] == ["… well\n", "…", "…", "…"]
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


def test_the_readme_begins_with_the_demo_and_bootstrap_prints_the_remedy() -> None:
    first = next(commands((ROOT / "README.md").read_text()))
    assert first.text.startswith("make demo")
    printed = "✗ Something is missing\n  Run:  sudo apt-get install python3-venv bubblewrap\n  then\n"
    found = REMEDY.search(printed)
    assert found is not None
    assert found[1] == "apt-get install python3-venv bubblewrap"


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
    assert problem(Command("it", 0, "… well\n"), 0, "It did\n  well.") == "it did not print what the README shows"
    assert problem(Command("it", 0, "… well\n"), 0, "It did\n  well") == ""
    found = problem(Command("it", 3), code, output)
    assert wrong in found
    assert bool(wrong) == bool(found)


LACKS = {"what": "bwrap is not installed", "fix": "Run `apt-get install bubblewrap`.", "fatal": True}
UNBUILT = {"what": "the runtime is not built", "fix": "Run `glovebox setup`.", "fatal": True}
HARMLESS = {"what": "no control groups", "fix": "Run the server as root.", "fatal": False}


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def says(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def answer(*missing: dict[str, Any], docker: bool = False, profiles: str | None = None) -> None:
        drivers = [
            {"driver": "bubblewrap", "missing": missing, "usable": not missing},
            {"driver": "docker", "missing": [], "usable": docker},
        ]
        body = json.dumps({"drivers": drivers, "profiles": {"error": profiles}}).encode()

        async def run(*_: object, **__: object) -> Any:
            return SimpleNamespace(stdout=body, stderr=b"", returncode=4)

        monkeypatch.setattr(demo.anyio, "run_process", run)

    return answer


async def test_what_is_missing_is_said_once_with_its_fix(demo: ModuleType, says: Callable[..., None]) -> None:
    """Before setup downloads anything. The control: setup builds the runtime, and docker would do."""
    says(LACKS, UNBUILT)
    with pytest.raises(demo.Surprise) as raised:
        await demo.check()
    assert str(raised.value).count("apt-get install bubblewrap") == 1
    assert "glovebox setup" not in str(raised.value)
    says(profiles="a.toml:1: x: unknown key")
    with pytest.raises(demo.Surprise, match=r"a\.toml:1"):
        await demo.check()
    says(UNBUILT, HARMLESS)
    await demo.check()
    says(LACKS, docker=True)
    await demo.check()
    assert demo.NAME.name == "glovebox demo"
