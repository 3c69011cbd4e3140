"""What stands around calls: one folder for each guard. ``registry`` has their order; the core knows none of them."""
