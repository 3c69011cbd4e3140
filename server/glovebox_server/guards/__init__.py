"""Guards around calls: one folder for each. ``registry`` has their order; the core knows none of them."""
