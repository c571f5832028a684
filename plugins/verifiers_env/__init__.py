"""Environments of Prime Intellect's verifiers as task sources. Each runs in a process and a virtual environment of its
own (docs/environments/verifiers.md)."""
