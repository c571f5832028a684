"""A rank other than 0 on this machine: `python -m turnlog.trainer.follower RANK WORLD TENSOR PIPELINE PORT`."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    """Serve until rank 0 releases us or dies."""
    from turnlog.trainer.launch import serve_rank

    rank, world_size, tensor, pipeline, port = map(int, arguments)
    serve_rank(None, rank=rank, world_size=world_size, tensor=tensor, pipeline=pipeline, port=port)


if __name__ == "__main__":
    main(sys.argv[1:])
