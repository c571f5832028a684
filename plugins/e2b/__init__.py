"""The backend for E2B's machines: each sandbox is a microVM of that service."""

from turnlog.plugins.e2b.backend import E2b as E2b
