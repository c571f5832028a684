"""Redaction: secrets and personal data are found by rules and replaced by typed, numbered placeholders."""
