"""Stops: what an operator or a watch rule has halted, until it is resumed."""
