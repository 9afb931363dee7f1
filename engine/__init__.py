"""One model on one device: weights, paged KV cache, attention, sampling. No queue, no gRPC, no Ray."""
