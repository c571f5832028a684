"""The backend for images: each sandbox is a container of a Docker daemon."""

from turnlog.sandbox_workers.backends.docker.backend import Docker as Docker
