"""Measured comparisons: each module prints a table, or JSON with --json."""
