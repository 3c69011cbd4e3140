"""Slows, then refuses, calls that keep failing."""
