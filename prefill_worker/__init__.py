"""Computes prompts and ships their KV blocks."""
