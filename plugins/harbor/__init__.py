"""Task folders in Harbor's format: parsed, built, run by an agent and judged. See docs/environments/harbor.md."""
