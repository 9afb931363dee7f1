"""Starts a deployment on a Ray cluster."""
