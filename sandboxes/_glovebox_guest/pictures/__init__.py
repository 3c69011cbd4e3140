"""Pictures: kind and size from headers, and smaller copies of those too large to be shown."""
