"""Completion in real shells: what is typed is completed by the program that is typed."""

import os
import shutil
import subprocess  # noqa: TID251 - starts shells
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
#: A shell, and the program that asks it to complete "glovebox audit " and prints what it offers.
SHELLS = {
    "bash": """eval "$(glovebox completion bash)"
complete -p glovebox
COMP_WORDS=(glovebox audit "") COMP_CWORD=2
_glovebox_completion glovebox
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """autoload -U compinit; compinit -u -d "$HOME/dump"
eval "$(glovebox completion zsh)"
print -r -- $_comps[glovebox]
_describe() { print -rl -- "${completions_with_descriptions[@]}" }
compadd() { print -rl -- "${completions[@]}" }
words=(glovebox audit "") CURRENT=3
_glovebox_completion
""",
    "fish": """glovebox completion fish | source
complete -C "glovebox audit "
""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands(shell: str, tmp_path: Path) -> None:
    """The commands of a group, found by the launcher on the PATH."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [program, *options, "-c", SHELLS[shell]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    for command in ("query", "show", "verify"):
        assert command in done.stdout, done.stderr
    assert "serve" not in done.stdout, "another group's are not offered"


def test_a_shell_that_is_not_known_is_refused() -> None:
    """With what there is."""
    done = subprocess.run([BIN / "glovebox", "completion", "csh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
