"""Verifiers that an environment may use beside `FunctionVerifier`; `judges` implements each kind.

Every verifier has a name and a version, which are recorded with the reward. If a verifier crashes, is not done in time
or answers with something that is not a reward, the session has no reward (`verifier_failure`), rather than a reward of
0.
"""

from turnlog.infra.environments.verifiers.kinds import EnvironmentVerifier as EnvironmentVerifier
from turnlog.infra.environments.verifiers.kinds import Grading as Grading
from turnlog.infra.environments.verifiers.kinds import HttpVerifier as HttpVerifier
from turnlog.infra.environments.verifiers.kinds import JudgeVerifier as JudgeVerifier
from turnlog.infra.environments.verifiers.kinds import PatchVerifier as PatchVerifier
from turnlog.infra.environments.verifiers.kinds import SandboxVerifier as SandboxVerifier
from turnlog.infra.environments.verifiers.kinds import StagedVerifier as StagedVerifier
from turnlog.infra.environments.verifiers.kinds import WeightedSum as WeightedSum
