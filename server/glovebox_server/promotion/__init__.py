"""Promotion: files from quarantine put into folders that the operator named, all or none of them, and put back."""
