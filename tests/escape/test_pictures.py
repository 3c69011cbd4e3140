"""Pictures that clients would not take: smaller copies are made where the program ran, and the originals are kept."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.fixtures.brokered import DRIVERS, Called, Glovebox, write_shipped

from _glovebox_guest.pictures.header import kind
from glovebox_sandboxes.contract.pictures import HEAD_BYTES, MAX_BYTES, fits
from glovebox_server import app as apps
from glovebox_server.artifacts.store import ArtifactReader
from glovebox_server.calls import Image, Principal
from glovebox_server.settings import Settings

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

PNG = """
import struct, zlib
def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
def png(width, height, *parts):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\\x89PNG\\r\\n\\x1a\\n" + head + b"".join(parts) + chunk(b"IEND", b"")
"""
NOISE = """
import numpy
from PIL import Image
noise = numpy.random.default_rng(1).integers(0, 255, (900, 1200, 3), dtype="uint8")
Image.fromarray(noise).save("/output/noise.png")
"""
FIGURE = """
import matplotlib.pyplot as plt
plt.figure(figsize=(30, 20))
for k in range(40):
    plt.plot([0, k], [k, 0])
plt.axis("off")
plt.show()
"""


@asynccontextmanager
async def opened(directory: Path, driver: str = "bubblewrap") -> AsyncIterator[Glovebox]:
    """A server with its shipped profiles, ``run_python``'s for this driver alone, and an empty workspace."""
    workspace, profiles = directory / "workspace", directory / "profiles"
    for each in (workspace, profiles):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    write_shipped(profiles, driver)
    settings = Settings(workspace=workspace, state_dir=directory / "state", profiles_dir=profiles)
    async with apps.opened(settings, "cli") as app:
        yield Glovebox(app)


def shown(called: Called) -> list[Image]:
    """The pictures of a result; clients take each of them."""
    found = [each for each in called.result.content if isinstance(each, Image)]
    for each in found:
        assert kind(each.data) == each.media_type
        assert fits(each.data[:HEAD_BYTES], each.media_type, len(each.data), MAX_BYTES)
    return found


SAVED = """
import os, matplotlib.pyplot as plt
plt.figure()
plt.plot([1, 2, 3])
plt.savefig("/output/p.png")
"""
SHOWN = (
    SAVED,
    SAVED.replace('"/output/p.png"', '"/output/p.png", bbox_inches="tight", dpi=150'),
    SAVED.replace("plt.savefig(", "os.chdir('/output')\nplt.gcf().savefig(").replace("/output/p.", "p."),
    f"{SAVED}plt.show()\n",
)
"""Programs after which a file shows the figure."""
CHANGED = (
    f"{SAVED}plt.plot([3, 1])\n",
    f"{SAVED}plt.plot([3, 1])\nplt.savefig('/tmp/q.png')\n",
    f"{SAVED}plt.gca().lines[0].set_ydata([3, 1, 2])\nplt.gcf().canvas.draw()\n",
    f"{SAVED}os.remove('/output/p.png')\n",
    SAVED.replace("/output/", "/tmp/"),  # noqa: S108 - inside the sandbox
    SAVED.replace(".png", ".pdf"),
)
"""Those after which none does."""


@pytest.mark.parametrize(
    ("pieces", "figures", "files"),
    [
        ((*SHOWN, "plt.figure()\nplt.plot([3, 1])"), 1, ["p0.png", "p1.png", "p2.png", "p3.png"]),
        (CHANGED, len(CHANGED), ["p0.png", "p1.png", "p2.png", "p5.pdf"]),
    ],
    ids=["shown", "changed"],
)
async def test_a_figure_that_is_saved_comes_back_once(
    pieces: tuple[str, ...], figures: int, files: list[str], tmp_path: Path
) -> None:
    """As the file; the controls are not saved, or change it after that, remove it, or save where it is not shown."""
    code = "".join(piece.replace("p.p", f"p{number}.p") for number, piece in enumerate(pieces))
    async with opened(tmp_path) as glovebox:
        called = await glovebox.call("run_python", code=code)
    assert [each["name"] for each in called.fields["images"]] == [f"figure-{n + 1}.png" for n in range(figures)]
    assert [each["name"] for each in called.fields["artifacts"]] == files
    assert len(shown(called)) == figures + sum(name.endswith(".png") for name in files)


async def test_a_figure_too_large_to_be_kept_is_not_taken_for_another(tmp_path: Path) -> None:
    """The control beside it is kept, and shown as it is."""
    code = """
import numpy, matplotlib.pyplot as plt
plt.plot([1, 2])
plt.figure(figsize=(25, 18))
plt.axes([0, 0, 1, 1])
noise = numpy.random.default_rng(1).integers(0, 255, (1800, 2500, 3), dtype="uint8")
plt.imshow(noise, aspect="auto", interpolation="nearest")
"""
    async with opened(tmp_path) as glovebox:
        called = await glovebox.call("run_python", code=code)
    (kept,) = called.fields["images"]
    assert [len(each.data) == kept["bytes"] for each in shown(called)] == [True, False]
    (note,) = called.fields["notes"]
    assert note.startswith("A picture: shown at ")
    assert note.endswith(" is too large to be kept as a figure: save it to /output")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_large_pictures_are_shown_smaller_and_kept_as_they_are(driver: str, tmp_path: Path) -> None:
    """A file, a figure, and a picture of the workspace; the record has a digest of each copy."""
    async with opened(tmp_path, driver) as glovebox:
        drawn = await glovebox.call("run_python", code=FIGURE + NOISE)
        assert len(shown(drawn)) == 2
        (figure,), (file,) = drawn.fields["images"], drawn.fields["artifacts"]
        assert (figure["name"], file["name"]) == ("figure-1.png", "noise.png")
        assert file["bytes"] > MAX_BYTES
        first, second = drawn.fields["notes"]
        assert first.startswith("figure-1.png: shown at ")
        assert first.endswith(f" is {figure['uri']}")
        assert second.startswith("noise.png: shown at ")
        assert second.endswith(f"; the original, 1200 × 900, is {file['uri']}")
        assert {"image:0", "shown:image:0", "shown:noise.png"} <= {
            each["name"] for each in drawn.records[-2].data["outputs"]
        }
        reader: ArtifactReader
        async with glovebox.app.artifacts.open(file["uri"], Principal(id="local:test", transport="cli")) as reader:
            content = await reader.read(10_000_000)
        (tmp_path / "workspace" / "noise.png").write_bytes(content)
        read = await glovebox.call("read_workspace_file", path="noise.png")
        assert len(shown(read)) == 1
        assert f"[noise.png: image/png, 1200 × 900 pixels, {len(content)} bytes; shown at " in read.text


BAD = {
    "bomb": 'png(40000, 40000, chunk(b"IDAT", zlib.compress(bytes(10**6))), chunk(b"tEXt", bytes(10**5)))',
    "no deflate": 'png(3000, 2000, chunk(b"IDAT", b"no deflate" * 10**4))',
    "torn": 'png(400, 300, chunk(b"IDAT", zlib.compress(__import__("os").urandom(360300))))[:200000]',
    "no header": 'b"\\x89PNG\\r\\n\\x1a\\n" + bytes(10**5)',
    "webp": 'b"RIFF\\xff\\xff\\xff\\x7fWEBPVP8X" + bytes(10**5)',
    "gif": 'b"GIF89a" + struct.pack("<HH", 60000, 60000) + b"\\x80\\0\\0" + bytes(10**5)',
    "jpeg": 'b"\\xff\\xd8" + (b"\\xff\\xe1\\xff\\xff" + bytes(65533)) * 3',
}


@pytest.mark.parametrize("bad", [["bomb", "no deflate", "torn"], ["no header", "webp"], ["gif", "jpeg"]])
async def test_a_picture_that_cannot_be_decoded_stays_a_file(bad: list[str], tmp_path: Path) -> None:
    """The call is as good as without it, and a sentence says why; beside it a sound one is shown (control)."""
    code = PNG + "".join(f"open('/output/bad-{name}.png', 'wb').write({BAD[name]})\n" for name in bad) + NOISE
    async with opened(tmp_path) as glovebox:
        called = await glovebox.call("run_python", code=code)
    assert (called.fields["ended"], called.fields["exit_code"]) == ("exited", 0)
    names = [f"bad-{name}.png" for name in bad]
    assert sorted(each["name"] for each in called.fields["artifacts"]) == sorted([*names, "noise.png"])
    said = {note.partition(": ")[0]: note for note in called.fields["notes"]}
    for name in names:
        assert said[name].startswith(f"{name}: not shown, it ")
        assert ("1600000000 pixels" if "bomb" in name else "cannot be decoded") in said[name]
    assert len(shown(called)) == 1


async def test_a_program_says_nothing_of_files_it_did_not_write(tmp_path: Path) -> None:
    """A copy that it sends itself, of a file that is none, and words for a terminal, come to nothing."""
    forge = """
import os, struct
def say(about, data):
    payload = about + b"\\0" + data
    os.write(3, b"S" + struct.pack(">I", len(payload)) + payload)
small = png(20, 10)
say(b'{"name":"no.png","media_type":"image/png","of":[1,1]}', small)
say(b'{"name":"a.txt","media_type":"image/png","of":[1,1]}', small)
say(b'{"name":"b.png","reason":"\\\\u001b[2J"}', b"")
open("/output/a.txt", "w").write("text")
open("/output/b.png", "wb").write(small)
"""
    async with opened(tmp_path) as glovebox:
        called = await glovebox.call("run_python", code=PNG + forge)
    assert len(shown(called)) == 1  # b.png, as it is
    assert called.fields["notes"] == ["A smaller copy of a picture is not what it claims."]


async def test_a_picture_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """A JPEG of 31 million pixels with 400 scans, each of a few bytes; the control has those it was made with."""
    make = """
from io import BytesIO
from PIL import Image
buffer = BytesIO()
Image.new("L", (5600, 5600), 200).save(buffer, "JPEG", progressive=True)
data = buffer.getvalue()
last = data.rindex(b"\\xff\\xda")
for name, scans in (("a.jpg", 1), ("b.jpg", 400)):
    padding = b"\\xff\\xfe\\xea\\x60" + bytes(59998)
    open("/output/" + name, "wb").write(data[:2] + 2 * padding + data[2:last] + scans * data[last:-2] + data[-2:])
"""
    async with opened(tmp_path) as glovebox:
        called = await glovebox.call("run_python", code=make.replace("\\\\", "\\"))
    assert called.fields["ended"] == "exited"
    assert [each["name"] for each in called.fields["artifacts"]] == ["a.jpg", "b.jpg"]
    assert len(shown(called)) == 1
    assert called.fields["notes"][1].startswith("b.jpg: not shown, no smaller copy was made of it in time; it is ")
    cpu_ms = called.fields["usage"]["cpu_ms"]
    assert cpu_ms is None or cpu_ms < 10_000  # all scans take some twenty seconds
