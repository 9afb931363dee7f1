"""Moves the blocks of one request from one worker's cache to another's."""
