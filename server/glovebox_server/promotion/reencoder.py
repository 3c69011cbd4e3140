"""Makes a picture anew from its pixels: the program that ``glovebox artifact reencode`` runs in a sandbox, as text.

Nothing here is called on the host: the bytes are hostile, and Pillow is in the sandbox. What else a picture carries
(comments, EXIF, XMP, colour profiles, chunks nobody knows, data behind its end) is left behind; what its pixels say is
not.
"""

from pathlib import Path
from typing import Any

MAX_PIXELS = 32_000_000
"""Decoded they take 128 MB, inside the shipped profile's memory. Counted before anything is decoded."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
PLAIN = ("1", "L", "I", "I;16", "RGB", "RGBA")
"""Modes that are written as they are."""


def main(inputs: str, output: str) -> None:
    """Write a JPEG for a JPEG, else a PNG, of the one picture in ``inputs``; of an animation its first picture.

    Raises:
        SystemExit: there can be none; says why.
    """
    from PIL import Image, ImageOps  # type: ignore[import-not-found]  # noqa: PLC0415 - in the sandbox's Python only

    (file,) = Path(inputs).iterdir()
    try:
        image: Any = Image.open(file, formats=FORMATS)
        photo = image.format == "JPEG"
        _require_decodable(image)
        image = ImageOps.exif_transpose(image)  # before it forgets which side is up
        if image.mode not in PLAIN:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        image.info = {}  # what Pillow would write again
        made = Path(output, f"{file.stem}.{'jpg' if photo else 'png'}")
        with made.open("wb") as opened:
            if photo:
                image.save(opened, format="JPEG", quality=95)
            else:
                image.save(opened, format="PNG")
    except Exception as problem:  # noqa: BLE001 - whatever a decoder of hostile bytes raises
        raise SystemExit(f"it is no picture that can be decoded ({type(problem).__name__})") from None


def _require_decodable(image: Any) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise SystemExit(f"it has more than {MAX_PIXELS} pixels")


def program() -> str:
    """The text of a program that makes the picture in ``/input`` anew in ``/output``."""
    return f"{Path(__file__).read_text(encoding='utf-8')}\nmain('/input', '/output')\n"
