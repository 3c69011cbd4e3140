"""Masks secrets in what a call gives back."""
