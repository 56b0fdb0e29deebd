"""Packaged tasks: settings as TOML, and the small model that they share."""
