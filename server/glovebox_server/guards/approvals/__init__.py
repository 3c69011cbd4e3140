"""Approvals: who is asked, what they saw and answered, and which one call an approval covers."""
