"""Contents and builds of container images."""
