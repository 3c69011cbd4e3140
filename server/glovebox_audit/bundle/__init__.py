"""Bundles: the evidence of one call or one run in one file that is checked offline."""
