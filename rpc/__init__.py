"""What every gRPC server and client of ours has in common."""
