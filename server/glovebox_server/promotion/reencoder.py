"""Re-encodes a picture from its pixels: the program that ``glovebox artifact reencode`` runs in a sandbox, as text.

The host never calls it: the bytes are hostile, and Pillow is in the sandbox. Only pixels are kept: comments, EXIF, XMP,
colour profiles, unknown chunks and trailing data are dropped. What the pixels show stays.
"""

from pathlib import Path
from typing import Any

MAX_PIXELS = 32_000_000
"""Decoded they take 128 MB, inside the shipped profile's memory. Checked before decoding."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
PLAIN = ("1", "L", "I", "I;16", "RGB", "RGBA")


def main(inputs: str, output: str) -> None:
    """Write the one picture in ``inputs``, JPEG as JPEG, others as PNG, first frame only; or raise ``SystemExit``."""
    from PIL import Image, ImageOps  # type: ignore[import-not-found]  # noqa: PLC0415 - in the sandbox's Python only

    (file,) = Path(inputs).iterdir()
    try:
        image: Any = Image.open(file, formats=FORMATS)
        photo = image.format == "JPEG"
        _require_decodable(image)
        image = ImageOps.exif_transpose(image)  # before the orientation is dropped
        if image.mode not in PLAIN:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        image.info = {}  # which Pillow would write again
        made = Path(output, f"{file.stem}.{'jpg' if photo else 'png'}")
        with made.open("wb") as opened:
            image.save(opened, format="JPEG" if photo else "PNG", quality=95)  # PNG has none
    except Exception as problem:  # noqa: BLE001 - a decoder of hostile bytes raises anything
        raise SystemExit(f"it is no picture that can be decoded ({type(problem).__name__})") from None


def _require_decodable(image: Any) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise SystemExit(f"it has more than {MAX_PIXELS} pixels")


def program() -> str:
    """Return a program that re-encodes the picture in ``/input`` into ``/output``."""
    return f"{Path(__file__).read_text(encoding='utf-8')}\nmain('/input', '/output')\n"
