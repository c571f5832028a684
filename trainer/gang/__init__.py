"""How the ranks hear what they are to do, and where they run."""

LOCAL_RANK = "LOCAL_RANK"
"""A rank's number on its machine, which says its device: in the environment, where torchrun puts it, too."""
