"""Where a process of a test, or of a chaos case, finds the servers."""

from __future__ import annotations

from turnlog.settings import Settings


def variables(settings: Settings) -> dict[str, str]:
    """The run and its servers, as the environment names them."""
    return {
        "TURNLOG_RUN_ID": settings.run.id,
        "TURNLOG_RUN_DIRECTORY": settings.run.directory,
        "TURNLOG_KAFKA_BOOTSTRAP": settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": settings.store.endpoint,
        "TURNLOG_STORE_BUCKET": settings.store.bucket,
        "TURNLOG_STORE_SECRET_KEY": settings.store.secret_key,
    }
