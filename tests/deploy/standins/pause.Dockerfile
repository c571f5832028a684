# The process that holds a pod's namespaces: it does nothing.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ENTRYPOINT ["sleep", "infinity"]
