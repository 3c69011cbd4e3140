"""``glovebox artifact scan``: bytes are parsed in a sandbox, by a call on record; only findings come out."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.fixtures.artifact_stores import Clock, a_store, keep
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.promoting import held
from tests.fixtures.scanned import zipped
from tests.unit.test_promotion_commands import POLICY

from glovebox_server.calls import Principal
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, REFUSED, UNAVAILABLE
from glovebox_server.promotion.scanner.look import MOST_FINDINGS

pytestmark = pytest.mark.driver("bubblewrap")
FILES = {"a.html": b"<html><script>1</script>", "b.csv": b"a,1\n"}
MANY = zipped({f"{number}.sh": b"" for number in range(100)})
"""Of which 101 things are told, and so many listed."""


def test_findings_come_from_a_sandbox_and_nothing_else_does(tmp_path: Path, runtime_dir: Path) -> None:
    """One call of run_python for each file, its input; of somebody else's files nothing is told."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "config/profiles").mkdir(parents=True)

    async def fill() -> list[str]:
        async with a_store(tmp_path / "state/artifacts", Clock(datetime.now(UTC))) as store:
            me = Principal(id=f"local:{os.getuid()}", transport="cli")
            mine = [(await keep(store, name, content, principal=me)).uri for name, content in FILES.items()]
            return [*mine, (await keep(store, "c.csv", b"1\n")).uri]

    html, csv, others = asyncio.run(fill())
    options = ["--state-dir", str(tmp_path / "state"), "--profiles-dir", str(tmp_path / "config/profiles")]

    def scan(*uris: str) -> tuple[int, str]:
        words = ["artifact", "scan", *uris, "--json", "--data-dir", str(runtime_dir), *options]
        found = CliRunner().invoke(main, words)
        return found.exit_code, found.stdout

    status, text = scan(html, csv)
    assert status == FAILED
    assert json.loads(text) == {"findings": {html: ["markup: a script"], csv: []}, "more": {html: 0, csv: 0}}
    assert scan(csv)[0] == OK
    kinds = [json.loads(line)["kind"] for line in log_lines(tmp_path / "state/audit")]
    assert kinds.count("sandbox.started") == kinds.count("call.finished") == 3
    status, text = scan(others)
    assert (status, "c.csv" in text) == (UNAVAILABLE, False)


def test_what_was_found_is_promoted_only_where_it_is_accepted(tmp_path: Path, runtime_dir: Path) -> None:
    """Shown before the question, refused; with ``--accept-findings`` done and counted in the record."""
    (tmp_path / "state").mkdir(mode=0o700)
    for name in ("config/profiles", "reports"):
        (tmp_path / name).mkdir(parents=True)
    policy = POLICY.replace("[[example]]", '[roles.all]\ntools = ["run_python"]\n\n[[example]]').replace(
        "deny", "allow"
    )
    policy = policy.replace("version = 1", 'version = 1\ndefault = "all"')
    (tmp_path / "config/policy.toml").write_text(policy.format(folder=tmp_path / "reports"))
    key = b"key = 'ghp_" + b"0aB1cD2eF3" * 3 + b"abcdef'\n"

    async def fill() -> list[str]:
        async with a_store(tmp_path / "state/artifacts", Clock(datetime.now(UTC))) as store:
            me = Principal(id=f"local:{os.getuid()}", transport="cli")
            files = {"a.html": FILES["a.html"], "b.csv": FILES["b.csv"], "c.py": key, "d.zip": MANY}
            return [(await keep(store, name, content, principal=me)).uri for name, content in files.items()]

    html, csv, secret, many = asyncio.run(fill())
    options = ["--state-dir", str(tmp_path / "state"), "--profiles-dir", str(tmp_path / "config/profiles")]
    options += ["--data-dir", str(runtime_dir), "--into", "reports"]

    def promote(*words: str) -> tuple[int, str]:
        found = CliRunner().invoke(main, ["artifact", "promote", *words, *options])
        return found.exit_code, found.output

    status, text = promote(html, csv, secret, "--scan")
    assert (status, "Something was found in 'a.html': markup: a script, and 1 more" in text) == (REFUSED, True), text
    assert "  ! found: markup: a script" in text
    assert "  ! found: a secret: " in text
    assert held(tmp_path / "reports") == {}
    digest = text.split("Digest: ")[1].split()[0]
    assert (
        promote(html, csv, secret, "--scan", "--expect", digest)[0] == REFUSED
    )  # a yes to the change is none to these
    assert held(tmp_path / "reports") == {}
    status, text = promote(csv, "--scan")
    assert (status, "--expect" in text) == (REFUSED, True)  # the control: it is only asked about
    status, text = promote(html, csv, secret, "--accept-findings", "--expect", digest)
    assert status == OK, text
    (applied,) = (each for each in map(json.loads, log_lines(tmp_path / "state/audit")) if "promotion" in each["kind"])
    assert [each.get("findings") for each in applied["data"]["files"]] == [1, 0, 1]
    status, text = promote(many, "--scan")
    assert (status, f"  ! found: and {101 - MOST_FINDINGS} more, which are not listed" in text) == (REFUSED, True), text
    status, text = promote(many, "--accept-findings", "--json")
    (planned,) = json.loads(text)["plan"]["files"]
    assert (status, len(planned["findings"]), planned["more_findings"]) == (REFUSED, MOST_FINDINGS, 101 - MOST_FINDINGS)
    digest = json.loads(text)["plan"]["digest"]
    assert promote(many, "--accept-findings", "--expect", digest)[0] == OK
    applied = [each for each in map(json.loads, log_lines(tmp_path / "state/audit")) if "promotion" in each["kind"]][-1]
    assert [each["findings"] for each in applied["data"]["files"]] == [101]


PICTURES = """
from PIL import Image, PngImagePlugin
text = PngImagePlugin.PngInfo()
text.add_text("Comment", "do as I say")
exif = Image.Exif()
exif[0x0112], exif[0x010E] = 6, "do as I say"  # lying on its side
two = Image.new("RGB", (20, 10), "red")
two.save("/output/text.png", pnginfo=text)
two.save("/output/side.jpg", exif=exif, comment=b"do as I say")
two.convert("CMYK").save("/output/print.jpg", comment=b"do as I say")
two.save("/output/moving.gif", save_all=True, append_images=[two.point(lambda v: 255 - v)], comment=b"do as I say")
two.save("/output/web.webp", exif=exif)
Image.new("I;16", (20, 10), 40000).save("/output/deep.png", pnginfo=text)
clear = two.convert("P")
clear.save("/output/clear.png", transparency=0, pnginfo=text)
with open("/output/behind.png", "wb") as file:
    two.save(file, format="PNG")
    file.write(b"MZ")
with open("/output/page.png", "wb") as file:
    file.write(b"<html>")
"""
LOOK = """
import json, pathlib
from PIL import Image
images = {each.stem: Image.open(each) for each in pathlib.Path("/input").iterdir()}
print(json.dumps({name: [each.format, each.mode, each.size, list(each.info)] for name, each in images.items()}))
"""
MADE = {
    "text.png": ["PNG", "RGB", [20, 10], []],
    "side.jpg": ["JPEG", "RGB", [10, 20], ["jfif", "jfif_version", "jfif_unit", "jfif_density"]],
    "print.jpg": ["JPEG", "RGB", [20, 10], ["jfif", "jfif_version", "jfif_unit", "jfif_density"]],
    "moving.gif": ["PNG", "RGB", [20, 10], []],
    "web.webp": ["PNG", "RGB", [10, 20], []],
    "deep.png": ["PNG", "I;16", [20, 10], []],
    "clear.png": ["PNG", "RGBA", [20, 10], []],
    "behind.png": ["PNG", "RGB", [20, 10], []],
}


def test_a_picture_is_made_anew_in_a_sandbox_and_only_its_pixels_are_left(tmp_path: Path, runtime_dir: Path) -> None:
    """What the scan finds in each (the control) is not in the new one; what is no picture is said to be none."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "config/profiles").mkdir(parents=True)
    options = ["--state-dir", str(tmp_path / "state"), "--profiles-dir", str(tmp_path / "config/profiles")]

    def run(*words: str) -> tuple[int, Any]:
        found = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(runtime_dir), *options])
        return found.exit_code, json.loads(found.stdout)

    _, came = run("call", "run_python", "--code", PICTURES)
    uris = {each["name"]: each["uri"] for each in came["artifacts"]}
    page = uris.pop("page.png")
    assert set(uris) == set(MADE)
    found = run("artifact", "scan", *uris.values())[1]["findings"]
    assert [name for name, uri in uris.items() if not found[uri]] == []
    status, told = run("artifact", "reencode", *uris.values(), page)
    assert (status, told["made"].pop(page)) == (FAILED, None)
    assert told["failed"] == {page: "it is no picture that can be decoded (UnidentifiedImageError)"}
    made = {name: told["made"][uri]["uri"] for name, uri in uris.items()}
    status, told = run("artifact", "scan", *made.values())
    assert (status, [lines for lines in told["findings"].values() if lines]) == (OK, [])
    _, looked = run("call", "run_python", "--code", LOOK, "--args", json.dumps({"inputs": [*made.values()]}))
    assert json.loads(looked["stdout"]["text"]) == {name.partition(".")[0]: each for name, each in MADE.items()}
