"""Removes what ``glovebox clean`` finds in the state and data directories."""
