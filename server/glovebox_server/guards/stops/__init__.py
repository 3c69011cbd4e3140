"""Stops: what an operator or a watch rule has brought to a halt, until it is resumed."""
