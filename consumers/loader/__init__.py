"""The weight loader: its loop and the choice of its engine (role), the engine's status on the log (engine_status), and
weight updates (swap)."""


class NoSuchEngine(Exception):
    """No setting identifies the loader's engine. Remedy: TURNLOG_ENGINE_URL, or an index into [engine] urls."""


class EngineSwapFailed(Exception):
    """The engine has died or is still paused. The supervisor restarts both engine and loader."""
