"""Clients that are not ours need Node: where it is installed, how it is run, and what a missing one means.

``tests/interaction/typescript/install.sh`` installs them; $GLOVEBOX_NODE_DIR says where (default: ``tests/.node``).
"""

import os
import subprocess  # noqa: TID251 - foreign clients are processes of their own
import sys
from pathlib import Path

from tests.must_run import unusable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: Seconds for one client's session; the conformance runner makes some forty.
SESSION_SECONDS = 60
CONFORMANCE_SECONDS = 240


def directory() -> Path:
    """Return where the packages are; skip without them, or fail where ``GLOVEBOX_MUST_RUN`` names ``node``."""
    place = Path(os.environ.get("GLOVEBOX_NODE_DIR", HERE.parent / ".node"))
    if not (place / "installed.json").exists():
        unusable("node", f"no Node packages in {place}: run tests/interaction/typescript/install.sh")
    return place


def run(place: Path, *command: str, seconds: float = SESSION_SECONDS, **environment: str) -> str:
    """Run a command with the packages' Node in front of the path; return its stdout, fail with both outputs."""
    whole = {**variables(place), **environment}
    done = subprocess.run(command, cwd=place, env=whole, capture_output=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-4000:].decode() + done.stderr[-4000:].decode()
    return done.stdout.decode()


def variables(place: Path) -> dict[str, str]:
    """The environment of a process that finds them."""
    path = f"{place / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "GLOVEBOX_NODE_DIR": str(place), "PYTHONPATH": str(ROOT)}


def fake_server(transport: str, where: Path, *names: str) -> list[str]:
    """Return the command of a server process; some clients pass no environment on, so it names its own."""
    return [
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-m",
        "tests.interaction.fake_server",
        transport,
        str(where),
        *names,
    ]
