"""Configuration files to start from: `rlflow new --list`."""
