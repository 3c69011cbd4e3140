"""docs/operate/glovebox.service as systemd reads it. That it starts, and a call runs in it: tests/inside/rounds."""

import re
import shutil
import subprocess  # noqa: TID251 - asks systemd
import sys
from pathlib import Path

import pytest
from tests.repo.files import ROOT

UNIT = ROOT / "docs/operate/glovebox.service"
EXPOSURE = 3.2
"""By systemd 252, which counts from 0 to 10; the page says so."""
#: What systemd would count, and a server of sandboxes needs: the unit says why.
LEFT_OUT = (
    "RestrictNamespaces",
    "ProtectProc",
    "ProcSubset",
    "ProtectKernelTunables",
    "ProtectKernelLogs",
    "ProtectHostname",
)

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")


def _analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def _unit(directory: Path, text: str) -> Path:
    """The unit where its program is: this environment's."""
    unit = directory / UNIT.name
    unit.write_text(text.replace("/opt/glovebox/bin", str(Path(sys.executable).parent)))
    return unit


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """The control is a misspelt option."""
    found = _analyze("verify", "--man=no", _unit(tmp_path, UNIT.read_text()))
    assert (found.returncode, found.stdout) == (0, "")
    found = _analyze("verify", "--man=no", _unit(tmp_path, UNIT.read_text().replace("PrivateTmp=", "PrivatTmp=")))
    assert "PrivatTmp" in found.stdout


def test_systemd_counts_it_as_little_exposed(tmp_path: Path) -> None:
    """Not more than the page says, and the page names that number; without its second half it would be unsafe."""
    page = (ROOT / "docs/operate/install.md").read_text()
    assert f"`systemd-analyze security` rates it {EXPOSURE}" in page
    security = ("security", "--offline=true", f"--threshold={round(EXPOSURE * 10)}")
    found = _analyze(*security, _unit(tmp_path, UNIT.read_text()))
    assert found.returncode == 0, found.stdout
    whole, _, _ = UNIT.read_text().partition("NoNewPrivileges=")
    bare = _analyze(*security, _unit(tmp_path, whole))
    assert bare.returncode != 0
    assert "UNSAFE" in bare.stdout


def test_what_it_leaves_out_it_names() -> None:
    """Nobody adds one of these without reading why not."""
    comments = " ".join(re.findall(r"^# (.*)$", UNIT.read_text(), re.MULTILINE))
    assert [name for name in LEFT_OUT if f"{name}=" not in comments] == []
    assert not re.search(rf"^({'|'.join(LEFT_OUT)})=", UNIT.read_text(), re.MULTILINE)
