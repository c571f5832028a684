"""What of Faust's worker is off: its check for slow streams, and its spinner."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import aiokafka
from faust.types import TP

from turnlog.plugins import faust_views as views
from turnlog.schemas.codec import Codec
from turnlog.settings import Settings


async def test_a_partition_whose_position_is_not_known_yet_ends_no_worker(tmp_path: Path) -> None:
    app = views.make_app(Settings(), Codec({}), tmp_path)
    consumer, client = app._new_consumer(), aiokafka.AIOKafkaConsumer()
    client._fetcher = SimpleNamespace(_subscriptions=client._subscription)
    place = aiokafka.TopicPartition("t", 0)
    client.assign([place])
    client._subscription.subscription.assignment.state_value(place).timestamp = 1000  # it has been asked for
    thread = consumer._thread
    thread._consumer, thread.time_started = client, 0.0  # as if a broker had been connected to
    try:
        consumer.verify_event_path(0.0, TP("t", 0))
    finally:
        client._fetcher = None
        await client.stop()
        thread.thread_loop.close()


async def test_a_worker_serves_no_page_of_fausts_that_shows_a_table(tmp_path: Path) -> None:
    """/views needs a role; /table/NAME/KEY/ of Faust would show the same rows to anybody."""
    web = views.make_app(Settings(), Codec({}), tmp_path).web
    web.init_server()
    served = {route.resource.canonical for route in web.web_app.router.routes()}
    assert served == {"/", "/views", "/healthz", "/readyz", "/metrics"}


async def test_a_worker_makes_no_log_records_of_a_level_that_it_does_not_write(tmp_path: Path) -> None:
    worker = views.make_worker(views.make_app(Settings(), Codec({}), tmp_path))
    root = logging.Logger("of this test", logging.WARNING)
    root.addHandler(logging.StreamHandler(sys.stderr))
    worker.on_setup_root_logger(root, logging.WARNING)
    assert not root.isEnabledFor(logging.INFO)
