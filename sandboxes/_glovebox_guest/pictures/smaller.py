"""Makes a smaller copy of a picture, for a client that rejects it as it is.

Decodes hostile bytes, so it runs in the process of a program or of a job, never in process 1. Pillow is imported by the
first picture that needs it.
"""

from __future__ import annotations

from _glovebox_guest.pictures.header import MAX_EDGE
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, BinaryIO, Iterable, Mapping

MAX_PIXELS = 32_000_000
"""Decoded they take 128 MB, inside the shipped profiles' memory. Counted before decoding."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_COLOURS = 256
_OCTREE = 2
"""``Image.Quantize.FASTOCTREE``: a fifth of the time of the others."""
_NO_DRAWING = 3
"""Factor above the bound from which on a PNG is taken for a photograph, and further ones are not tried."""
_QUALITIES = (85, 65)
_STEP = 0.85
_WHITE = (255, 255, 255)
_SIXTEEN_BITS = 1 / 256


class PictureError(Exception):
    """There is no smaller copy; the text has the reason."""


def share(sizes: Iterable[int], room: int) -> int:
    """Return the bytes each may have so that all fit; small ones leave the rest of their share to others."""
    waiting = sorted(sizes)
    most = room
    while waiting:
        most = room // len(waiting)
        if waiting[0] > most:
            break
        room -= waiting.pop(0)
    return most


def show_all(payload: Mapping[str, Any], emit: Emit) -> None:
    """Send a copy of each of ``pictures``, names and contents, of at most ``most`` bytes."""
    for name, data in payload["pictures"]:
        show(emit, name, data, payload["most"])


def show(emit: Emit, name: str, data: bytes, most: int) -> None:
    """Send a smaller copy of a picture, or why there is none; ``name`` is empty for the picture sent before."""
    from io import BytesIO

    try:
        media_type, data, _, of = smaller(BytesIO(data), most)
    except PictureError as problem:
        emit.shown({"name": name, "reason": str(problem)})
    else:
        emit.shown({"name": name, "media_type": media_type, "of": list(of)}, data)


def smaller(file: BinaryIO, most: int) -> tuple[str, bytes, tuple[int, int], tuple[int, int]]:
    """Return a copy of at most ``most`` bytes and ``MAX_EDGE`` pixels a side: type, bytes, size, original size.

    ``file`` is a PNG, JPEG, GIF or WebP picture; of an animation the first frame counts. Raises PictureError where it
    is too large to be decoded, or cannot be.
    """
    try:
        from PIL import Image, ImageOps, WebPImagePlugin  # type: ignore[import-not-found]  # in the runtime
    except ImportError:
        raise PictureError("this sandbox has no library for pictures") from None
    del WebPImagePlugin  # Pillow finds it by itself only after importing fifty others
    Image.MAX_IMAGE_PIXELS = None  # counted here
    try:
        image: Any = Image.open(file, formats=_FORMATS)
        of = image.size
        if (pixels := of[0] * of[1]) > MAX_PIXELS:
            raise PictureError(f"it has {pixels} pixels, and at most {MAX_PIXELS} are decoded")  # noqa: TRY301 - as below
        photo = image.format == "JPEG"
        image.draft(None, (MAX_EDGE, MAX_EDGE))  # a JPEG is decoded at a fraction of its size
        image = _plain(image)
        image.thumbnail((MAX_EDGE, MAX_EDGE), reducing_gap=2.0)
        image = ImageOps.exif_transpose(image)
        image.info = {}  # comments and colour profiles, which Pillow would write again, however long
        return *_encoded(image, most, photo=photo), of
    except (MemoryError, RecursionError):
        raise PictureError("there was no memory left for it") from None
    except PictureError:
        raise
    except Exception as problem:  # noqa: BLE001 - whatever a decoder of hostile bytes raises
        raise PictureError(f"it cannot be decoded ({type(problem).__name__})") from None


def _plain(image: Any) -> Any:
    """Convert to grey or RGB, on white where it is transparent: every encoder takes these."""
    if image.mode.startswith("I"):  # 16 bits, of which Pillow would keep the lower 8
        return image.convert("I").point(lambda value: value * _SIXTEEN_BITS).convert("L")
    if image.has_transparency_data:
        from PIL import Image

        image = image.convert("RGBA")
        behind = Image.new("RGB", image.size, _WHITE)
        behind.paste(image, mask=image)
        return behind
    return image if image.mode == "L" else image.convert("RGB")


def _encoded(image: Any, most: int, *, photo: bool) -> tuple[str, bytes, tuple[int, int]]:
    """Encode as PNG of 256 colours, which keeps lines and letters sharp, else as JPEG; shrink until one fits."""
    while max(image.size) > 1:
        if not photo:
            data = _saved(image.quantize(_COLOURS, method=_OCTREE), format="PNG")
            if len(data) <= most:
                return "image/png", data, image.size
            photo = len(data) > _NO_DRAWING * most
        for quality in _QUALITIES:
            data = _saved(image, format="JPEG", quality=quality)
            if len(data) <= most:
                return "image/jpeg", data, image.size
        image = image.resize([max(1, int(edge * _STEP)) for edge in image.size])
    raise PictureError(f"it does not fit into {most} bytes")


def _saved(image: Any, **options: object) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()
