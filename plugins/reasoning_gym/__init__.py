"""Tasks of reasoning-gym. Extra `reasoning-gym`; the package is imported in a process of its own."""
