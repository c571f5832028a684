"""The backend for images: each sandbox is a container of a Docker daemon."""

from turnlog.plugins.docker.backend import Docker as Docker
