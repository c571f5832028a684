"""How the ranks hear what they are to do, and where they run."""
