"""Detectors of suspicious success: pure functions from the records of sessions to findings (docs/cheating.md)."""
