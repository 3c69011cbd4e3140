"""Reads a picture's kind and size from a file's first bytes. Standard library only; nothing is decoded."""

from __future__ import annotations

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def kind(head: bytes) -> str | None:
    """Return the media type of a PNG, JPEG, GIF or WebP picture, None for anything else."""
    for magic, media_type in _MAGIC:
        if head.startswith(magic):
            return media_type
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def size(head: bytes, media_type: str) -> tuple[int, int] | None:
    """Return width and height in pixels of a PNG or GIF, whose headers have them at a fixed place; else None."""
    if media_type == "image/png" and head[12:16] == b"IHDR":  # https://www.w3.org/TR/png-3/#11IHDR
        return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    if media_type == "image/gif":
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    return None
