"""Contents and builds of container images. Nothing here may import a profile or the server."""
