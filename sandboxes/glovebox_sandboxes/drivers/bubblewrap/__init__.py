"""The embedded driver: sandboxes made by bubblewrap, without a daemon."""
