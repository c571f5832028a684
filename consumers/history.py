"""Reads of a whole topic: `turnlog.infra.history`, by the name that readers of the past here know it by."""

from turnlog.infra.history import EVERY_RUN, Reading, all_events, events, events_of, partitions, records

__all__ = ["EVERY_RUN", "Reading", "all_events", "events", "events_of", "partitions", "records"]
