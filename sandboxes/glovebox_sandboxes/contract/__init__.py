"""What a sandbox is, in words every driver shares: spec, plan, measurement, outcome, errors."""
