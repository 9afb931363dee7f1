"""Receives KV blocks and runs continuous batching."""
