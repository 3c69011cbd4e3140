"""Removes the host's paths from the failures that a client may read. Pure.

The operator finds the whole sentence in the server's log. Every text that goes to a client or into an audit record that
clients can read passes through here. Must never be imported here: anything but the standard library.
"""

import re

PLACE = "[host path]"
"""Replaces a path."""

# From a slash that begins a word to that word's end. In quotes to the closing one: a directory may have spaces.
_QUOTED = re.compile(r"""(?P<quote>['"`])/[^'"`\n]*(?P=quote)""")
_PATH = re.compile(r"""(?<![\w/:.<>])/(?:[^\s'"`,;:()\[\]{}]+)""")


def without_paths(text: str) -> str:
    """Return a sentence of ours with each absolute path replaced, encodable whatever it quotes."""
    encodable = text.encode("utf-8", "replace").decode()
    return _PATH.sub(PLACE, _QUOTED.sub(PLACE, encodable))
