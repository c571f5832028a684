"""Docker containers (gVisor and microVMs by their runtime), and a local Engine API for machines without a daemon."""
