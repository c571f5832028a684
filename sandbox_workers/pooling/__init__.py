"""The sandbox pools of one worker."""

from turnlog.sandbox_workers.pooling.worker_pools import SandboxPools as SandboxPools
