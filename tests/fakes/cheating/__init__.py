"""Invented sessions of agents that work honestly, and of agents that cheat, as the records that a run would hold."""
