"""The driver contract: spec, plan, measurement, outcome, errors."""
