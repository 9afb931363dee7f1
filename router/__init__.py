"""Validates, tokenises once, admits, places and streams. Imports no torch."""
