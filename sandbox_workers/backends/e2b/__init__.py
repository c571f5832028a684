"""Machines of E2B; and a local server of its API for those who have no key."""
