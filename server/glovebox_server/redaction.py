"""What a client may read of our own failures: the sentence without the host's paths. Pure.

The operator finds the whole sentence in the server's log. Every text that goes to a client or into an audit record that
clients can read passes through here. Must never be imported here: anything but the standard library.
"""

import re

PLACE = "[host path]"
"""What stands for a path."""

# From a slash that begins a word to the end of that word. In quotes to the closing one: a directory may have spaces.
_QUOTED = re.compile(r"""(?P<quote>['"`])/[^'"`\n]*(?P=quote)""")
_PATH = re.compile(r"""(?<![\w/:.<>])/(?:[^\s'"`,;:()\[\]{}]+)""")


def without_paths(text: str) -> str:
    """The text with each absolute path of a file replaced, and encodable whatever was in it.

    Args:
        text: a sentence of ours, perhaps with the words of the operating system or a daemon in it.
    """
    encodable = text.encode("utf-8", "replace").decode()
    return _PATH.sub(PLACE, _QUOTED.sub(PLACE, encodable))
