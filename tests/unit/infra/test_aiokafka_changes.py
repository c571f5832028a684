"""Importing turnlog, and creating its clients, changes nothing for another user of aiokafka in the same process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, importlib, logging, pkgutil, sys
import aiokafka

def every_module(package):
    yield package
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(found.name)

def snapshot():
    found = {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiokafka"]:
        found |= {f"{name}.{key}": value for key, value in vars(sys.modules[name]).items()}
        for kind in [value for value in vars(sys.modules[name]).values() if isinstance(value, type)]:
            if kind.__module__ == name:
                found |= {f"{name}.{kind.__name__}.{key}": value for key, value in vars(kind).items()}
        logger = logging.getLogger(name)
        found |= {f"logger {name}": (tuple(logger.filters), tuple(logger.handlers), logger.level)}
    return found

list(every_module(aiokafka))
before = snapshot()
import turnlog.infra.kafka
list(every_module(turnlog.infra.kafka))
from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.aiokafka_changes import MendedConsumer, MendedProducer

async def create():
    clients = [MendedProducer(transactional_id="owner"), MendedConsumer(group_id="group")]
    for client in clients:
        await client.stop()
    await Admin().close()

asyncio.run(create())
after = snapshot()
counter = "aiokafka.producer.producer.AIOKafkaProducer._PRODUCER_CLIENT_ID_SEQUENCE"
same = lambda one, other: one is other or (type(one) is type(other) in (tuple, int) and one == other)
print([key for key in before.keys() | after.keys() if key != counter and not same(before.get(key), after.get(key))])
"""


def test_turnlog_leaves_aiokafka_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
