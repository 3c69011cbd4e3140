"""Commands that look back: the audit log, calls, receipts, bundles."""
