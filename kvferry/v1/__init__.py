"""Generated protobuf and gRPC stubs (`make protos`)."""
