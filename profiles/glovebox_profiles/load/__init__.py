"""The loader: from TOML files to a set of profiles, every byte checked."""
