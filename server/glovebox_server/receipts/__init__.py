"""The signing key of receipts, and the recorder that issues them. ``glovebox_audit.receipts`` reads them."""
