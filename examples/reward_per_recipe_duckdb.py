"""The same in SQL over the archive: needs the object store alone, neither Kafka nor a registry nor turnlog.

python examples/reward_per_recipe_duckdb.py http://STORE BUCKET ARCHIVE_NAME, keys in AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY. Archive files are plain Avro: fastavro reads them, Arrow holds them, DuckDB asks.
"""

import io
import json
import os
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import duckdb
import fastavro
import pyarrow
from minio import Minio

if len(sys.argv) < 4:
    raise SystemExit(__doc__)
endpoint, bucket, archive = sys.argv[1:4]
place, keys = urlsplit(endpoint), (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
store = Minio(place.netloc, *keys, secure=place.scheme == "https", region="us-east-1")


def content(name: str) -> bytes:
    with store.get_object(bucket, name) as answer:
        return answer.read()


def records(topic: str, kind: str) -> Iterator[dict]:
    """Records of one kind; only what the index names is part of the archive."""
    for entry in store.list_objects(bucket, f"archive/{archive}/index/{topic}/", recursive=True):
        for row in fastavro.reader(io.BytesIO(content(json.loads(content(entry.object_name))["key"]))):
            if {"name": "record", "value": kind.encode()} in row["headers"]:
                yield row["record"]


columns = ("rollout_id", "recipe", "reward")
samples = pyarrow.Table.from_pylist(
    [{name: sample[name] for name in columns} for sample in records("segment-samples", "SegmentSample")]
)
rollouts = duckdb.sql("SELECT DISTINCT rollout_id, recipe, reward FROM samples")
report = duckdb.sql("SELECT recipe, count(*), round(avg(reward), 4) FROM rollouts GROUP BY recipe ORDER BY recipe")
for row in report.fetchall():
    print(*row)
