"""Tools that an agent may call in a sandbox.

Built in: python, shell, python_session, files, env_step; packages offer more (turnlog.infra.environments.tools).
`prepared` decides whether a call may run, before anything runs; `Prepared.run` runs it."""

from turnlog.sandbox_workers.tools.built_in import tools as tools
from turnlog.sandbox_workers.tools.preparation import Prepared as Prepared
from turnlog.sandbox_workers.tools.preparation import prepared as prepared
from turnlog.sandbox_workers.tools.tool import Call as Call
from turnlog.sandbox_workers.tools.tool import CallEnded as CallEnded
from turnlog.sandbox_workers.tools.tool import Refusal as Refusal
from turnlog.sandbox_workers.tools.tool import Tool as Tool
from turnlog.sandbox_workers.tools.tool import ToolEnd as ToolEnd
from turnlog.sandbox_workers.tools.tool import ToolFailed as ToolFailed
