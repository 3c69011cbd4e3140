"""Puts calls on record, with a receipt for each."""
