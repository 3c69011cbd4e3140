"""The Python that runs inside sandboxes, and the guest as files."""
