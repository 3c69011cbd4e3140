"""Commands that govern who may do what: declared here, done in ``actions.governance``."""
