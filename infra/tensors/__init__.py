"""Tensors in files, one at a time."""
