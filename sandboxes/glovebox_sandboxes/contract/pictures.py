"""Which pictures clients take as they are: what guest and host have to judge alike, by headers alone. No I/O."""

from _glovebox_guest.files.output import MAX_PICTURES
from _glovebox_guest.pictures.header import HEAD_BYTES, MAX_BYTES, MAX_EDGE, fits, kind, size
from _glovebox_guest.pictures.smaller import share

__all__ = ["HEAD_BYTES", "MAX_BYTES", "MAX_EDGE", "MAX_PICTURES", "fits", "kind", "share", "size"]
