"""Writers of the log's primary records: task feeder, gateway, agent runners, rewards."""

if __name__ == "producers":
    raise ImportError("import turnlog.producers, not producers: a twin import copies every class")
