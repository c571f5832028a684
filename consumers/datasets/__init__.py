"""Datasets: rows of a run as Parquet or Arrow files, with a manifest that says where each came from."""
