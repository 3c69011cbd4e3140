"""What ``glovebox clean`` removes from the state and data directories."""
