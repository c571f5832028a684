"""API adapters, one per module."""
