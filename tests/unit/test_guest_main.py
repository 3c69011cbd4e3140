"""The guest's first step, outside of any sandbox: it must not do anything there."""

import json
import subprocess  # noqa: TID251 - the guest, as a program
import sys
from pathlib import Path

from tests.repo.files import ROOT

from glovebox_sandboxes.runtime import guest_tree

START = "import sys; sys.path.insert(0, sys.argv[1]); from _glovebox_guest.main import main; main()"


def test_the_guest_refuses_to_run_anywhere_but_in_its_own_pid_namespace(tmp_path: Path) -> None:
    """It ends a job by killing every process it can see: as anything but process 1 that would be the user's all."""
    guest_tree.write(tmp_path)
    config = json.dumps({"path": [], "hidden": [], "preload": [], "input": "", "output": "", "proxy": False})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", START, str(tmp_path), config],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"process 1 of a pid namespace" in done.stderr


def test_the_guest_starts_without_the_packages_that_take_long() -> None:
    """What it needs of them comes from their C modules; the control: one import brings what is looked for."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import {}; print(*sorted(sys.modules))"
    slow = {"enum", "re", "json", "socket", "ctypes", "hashlib", "ast", "signal", "typing", "dataclasses", "contextlib"}

    def loaded(what: str) -> set[str]:
        command = [sys.executable, "-I", "-S", "-c", program.format(what), str(ROOT / "sandboxes")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert loaded("_glovebox_guest.main, _glovebox_guest.work, _glovebox_guest.zygote") & slow == set()
    assert {"signal", "enum"} <= loaded("signal")
    ran = "_glovebox_guest.program.cell as cell; cell.execute({!r}, {{}})"
    assert "asyncio" not in loaded(ran.format("async def main(): pass\nmain\n1;"))
    assert "asyncio" in loaded(ran.format("async def main(): pass\nawait main()"))
