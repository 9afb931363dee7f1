"""Faults by a seed over a live deployment: real processes, real gRPC, real Ray actors."""
