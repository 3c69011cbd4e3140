"""Hides secret files of the workspace from programs."""
