"""Sandboxes that are ready before their calls come."""
