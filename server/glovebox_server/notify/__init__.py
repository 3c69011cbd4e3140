"""Notifications: people elsewhere hear what waits, alarms, stops or does not verify; nothing is decided here."""
