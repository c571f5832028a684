"""Weights as files: safetensors streams, deltas, adapters, versions on disk, and their transfer into engines."""
