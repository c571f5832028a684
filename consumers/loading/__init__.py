"""What a weight loader is made of: which engine is its own (choice), what the log says of that (standing), and how
weights come into it (swap). The loader itself is consumers/loader.py.
"""


class NoSuchEngine(Exception):
    """The loader is not told which engine is its own. Remedy: TURNLOG_ENGINE_URL, or an index into [engine] urls."""


class EngineSwapFailed(Exception):
    """The engine is gone or left paused; the supervisor restarts both."""
