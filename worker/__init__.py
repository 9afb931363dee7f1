"""What prefill and decode workers have in common: steps, reports, a host on the network, a Ray actor."""
