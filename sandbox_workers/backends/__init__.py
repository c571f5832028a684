"""Sandbox backends, one module each, and the parts that the local ones share."""
