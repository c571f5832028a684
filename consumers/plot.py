"""The reward curve as a PNG."""

from __future__ import annotations

from pathlib import Path


def plot_rewards(rewards: list[float], path: Path, *, title: str) -> None:
    """Draw the mean reward of each step. Needs the `demo` extra (matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
