"""The systems that kvferry is compared with, each in an environment of its own outside the repository."""
