"""The process that prepares and ends sandboxes, and leases each to one call of a server."""
