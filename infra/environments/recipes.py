"""Moved to turnlog.environments; this path works until 0.3.0."""

from turnlog.infra.environments.agents import *  # noqa: F403
from turnlog.infra.environments.episodes import *  # noqa: F403
from turnlog.infra.environments.simulations import *  # noqa: F403
from turnlog.infra.environments.sources import *  # noqa: F403
from turnlog.infra.environments.tasks import *  # noqa: F403
from turnlog.infra.environments.tasks import Recipe as PlainRecipe  # noqa: F401
from turnlog.infra.environments.warm_starts import *  # noqa: F403
