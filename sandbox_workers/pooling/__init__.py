"""Warm sandboxes: slots, leases, resets, what is kept ready."""
