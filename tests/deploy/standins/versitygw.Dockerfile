# Stands in for versity/versitygw:v1.8.0: the same source, built from Go's module proxy.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY versitygw /app/versitygw
ENTRYPOINT ["/app/versitygw"]
