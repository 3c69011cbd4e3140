"""Telemetry: totals of the audit log, for Prometheus and OTLP, and traces. Imported only where it is switched on.

Rule 1  Totals are counted from the log's own lines, also those of killed servers: they equal the log, not our memory.
Rule 2  Each value of a label comes from a closed set; any other is ``_OTHER``. No caller makes a series.
Rule 3  No call waits for any of it.
"""
