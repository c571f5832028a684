"""Folder that the driver adds to the import path of the environment's interpreter."""
