"""turnlog: an event-sourced data plane and training loop for agentic RL."""

__version__ = "0.2.0"
