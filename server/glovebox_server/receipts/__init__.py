"""The key that signs receipts, and the recorder that has them signed. ``glovebox_audit.receipts`` reads them."""
