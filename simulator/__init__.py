"""A deployment in simulated time: real schedulers, placement and queues; workers from cost models."""
