"""Where Kafka's own clients place a key: murmur2 over the key, sign bit cleared, modulo partitions.

Source: Apache Kafka, org.apache.kafka.common.utils.Utils.murmur2 and Utils.toPositive (DefaultPartitioner).
"""

from __future__ import annotations

_SEED = 0x9747B28C
_MIX = 0x5BD1E995
_WORD = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The unsigned 32-bit hash of `key`."""
    value = _SEED ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _MIX & _WORD
        word = (word ^ word >> 24) * _MIX & _WORD
        value = (value * _MIX & _WORD) ^ word
    if whole != len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MIX & _WORD
    value = (value ^ value >> 13) * _MIX & _WORD
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of `key` among `partitions`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
