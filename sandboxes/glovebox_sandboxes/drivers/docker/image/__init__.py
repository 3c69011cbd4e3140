"""Container images: what is in them and how they are built. Nothing here may import a profile or the server."""
