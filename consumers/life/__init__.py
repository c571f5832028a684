"""Deletion of runs, and garbage collection in the store."""
