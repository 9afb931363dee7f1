"""Drives an OpenAI-compatible server and reports what its clients see."""
