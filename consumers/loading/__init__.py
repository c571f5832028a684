"""Parts of the weight loader: the choice of its engine (choice), the engine's status on the log (standing), and weight
updates (swap). The loader itself is consumers/loader.py."""


class NoSuchEngine(Exception):
    """No setting identifies the loader's engine. Remedy: TURNLOG_ENGINE_URL, or an index into [engine] urls."""


class EngineSwapFailed(Exception):
    """The engine has died or is still paused. The supervisor restarts both engine and loader."""
