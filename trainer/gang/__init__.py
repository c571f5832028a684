"""RPC from rank 0 to all ranks, and their launchers (local, torchrun, Ray)."""

LOCAL_RANK = "LOCAL_RANK"
"""Environment variable with a rank's number on its machine, which selects its device; torchrun sets it too."""
