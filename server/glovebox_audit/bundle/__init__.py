"""Bundles: what one call or one run did, in one file that is checked offline, with nothing of a server at hand."""
