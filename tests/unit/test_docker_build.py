"""The image's build: what goes into it is ours to read and nobody's to write, and a failed step is told."""

import tarfile

import pytest

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.image import build


def test_files_in_the_image_belong_to_root_and_are_writable_by_nobody_else() -> None:
    """Whatever umask, owner and special bits the builder's files have."""
    entry = tarfile.TarInfo("packages/evil")
    entry.mode, entry.uid, entry.gid, entry.uname, entry.mtime = 0o6777, 1000, 1000, "someone", 1_700_000_000
    made = build._as_root(entry)
    assert (made.mode, made.uid, made.gid, made.uname, made.mtime) == (0o644, 0, 0, "root", 0)
    entry.type = tarfile.DIRTYPE
    assert build._as_root(entry).mode == 0o755


def test_a_failed_step_is_told_with_its_last_words() -> None:
    """The Engine's error and the end of what the step printed before it."""
    answers = [{"stream": "x" * 10_000}, {"stream": "no numpy"}, {"error": "returned a non-zero code: 1"}]
    with pytest.raises(SandboxError, match=r"non-zero code: 1.*no numpy") as told:
        build._follow(answers)
    assert len(told.value.reason) < 2_000


def test_a_build_without_error_is_read_to_its_end() -> None:
    """Control: progress alone is fine."""
    build._follow([{"stream": "Step 1"}, {"aux": {"ID": "sha256:ab"}}])


def test_every_locked_package_has_hashes() -> None:
    """Nothing can be installed that was not locked: pip refuses a requirement without a hash."""
    lines = build.LOCK.read_text().splitlines()
    pins = [line for line in lines if "==" in line and not line.startswith("#")]
    assert {pin.partition("==")[0] for pin in pins} >= {"numpy", "pandas", "matplotlib", "tzdata"}
    assert all(pin.endswith(" \\") for pin in pins)
    assert all("--hash=sha256:" in line for line in lines if line.startswith("    "))


def test_another_base_or_recipe_is_another_image() -> None:
    """The first step's image is named after everything that goes into it, the base's name included."""
    assert build.runtime_tag("a") == build.runtime_tag("a")
    assert build.runtime_tag("a") != build.runtime_tag("b")
