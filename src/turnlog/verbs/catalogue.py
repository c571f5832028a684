"""`turnlog topics` and `turnlog schemas`: what the log is made of."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings, SettingsError
from turnlog.verbs.verb import Verb

if TYPE_CHECKING:
    from turnlog.infra.topics_admin import Acl


def _topics_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "action", choices=("apply", "check", "acls"),
        help="create the topics, check their configuration, or print the rights that each role needs",
    )  # fmt: skip
    verb.add_argument(
        "--principal", action="append", default=[], metavar="ROLE=User:NAME",
        help="acls: Kafka principal of a role (default User:ROLE); may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--format", choices=("kafka-acls", "json"), default="kafka-acls",
        help="acls: kafka-acls commands (default) or a JSON list",
    )  # fmt: skip


def _topics(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "acls":
        print(*acls_page(settings, arguments.principal, arguments.format), sep="\n")
        return ExitStatus.DONE
    return ending.run_verb(apply_or_check(arguments.action, settings))


def acls_page(settings: Settings, principals: Sequence[str], form: str) -> list[str]:
    """Return the lines that `turnlog topics acls` prints. `principals`: one ROLE=User:NAME each. Raises
    SettingsError."""
    from turnlog.infra.topics_admin import ROLES, VERBS, acls

    named = dict(one.split("=", 1) for one in principals if "=" in one)
    strange = [one for one in principals if one.partition("=")[0] not in ROLES or ":" not in one.partition("=")[2]]
    if strange:
        raise SettingsError(f"--principal {strange[0]}: not ROLE=User:NAME, where ROLE is one of {', '.join(ROLES)}")
    found = [acl for role in ROLES for acl in acls(settings, role, named.get(role, ""))]
    if form == "json":
        return [json.dumps([asdict(acl) for acl in found], indent=2)]
    lines = [
        "# kafka-acls.sh is part of Apache Kafka; admin.properties has its client settings for --bootstrap-server."
    ]
    for role in ROLES:
        lines.append(f"# {role}{': turnlog ' + VERBS[role] if role in VERBS else ''}")
        lines += [_command(settings, acl) for acl in found if acl.role == role]
    return lines


def _command(settings: Settings, acl: Acl) -> str:
    where = settings.kafka.bootstrap or "KAFKA:9092"
    pattern = () if acl.resource == "cluster" else (acl.name, "--resource-pattern-type", acl.pattern)
    return shlex.join([
        "kafka-acls.sh", "--bootstrap-server", where, "--command-config", "admin.properties", "--add",
        "--allow-principal", acl.principal, "--operation", acl.operation, f"--{acl.resource}", *pattern,
    ])  # fmt: skip


async def apply_or_check(action: str, settings: Settings) -> int:
    """Run `turnlog topics apply|check`: print what was done or found. Returns DIFFERS if a check found a problem."""
    from turnlog.infra.kafka import KafkaLog
    from turnlog.infra.roles.terminal import say
    from turnlog.infra.run_folder import resolve_endpoints
    from turnlog.infra.topics_admin import WARNING, apply, check, check_internal

    settings = resolve_endpoints(settings)
    log = KafkaLog.of(settings.kafka)
    try:
        if action == "apply":
            created = await apply(log, settings)
            say(f"created {', '.join(created)}" if created else "every topic of the catalogue exists")
            return 0
        problems = check_internal(await log.internal_topics(), settings) + await check(log, settings)
    finally:
        await log.close()
    say(*problems or ["every topic matches the catalogue"])
    wrong = any(not problem.startswith(WARNING) for problem in problems)
    return ExitStatus.DIFFERS if wrong else ExitStatus.DONE


def _schemas_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "action", choices=("check", "release", "asyncapi"),
        help="check, cut the next release, or print topics, records, readers and writers as AsyncAPI 3.0",
    )  # fmt: skip
    verb.add_argument("--against", type=Path, metavar="DIR", help="folder of releases (default: the package's)")


def _schemas(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "asyncapi":
        from turnlog.asyncapi_page import asyncapi_page

        print(asyncapi_page(settings), end="")
        return ExitStatus.DONE
    from turnlog.schemas.releases import FOLDER, changed_records, check, cut, releases

    past = releases(arguments.against)
    if arguments.action == "release":
        name, names = cut(arguments.against or FOLDER)
        print(f"{name}: {', '.join(names)}" if name else "nothing has changed since the last release")
        return ExitStatus.DONE
    found = check(past)
    for problem in found:
        print(f"{problem} (rule {problem.rule})")
    if not found:
        print(f"today's schemas may follow {', '.join(release.name for release in past) or 'nothing: no release yet'}")
    print(f"unreleased: {', '.join(changed_records(past)) or 'none'}")
    return ExitStatus.DIFFERS if found else ExitStatus.DONE


VERBS = (
    Verb("topics", "create or check the topics of a run; print the ACLs of its roles", _topics, _topics_arguments),
    Verb("schemas", "check the schemas against every release; print them as AsyncAPI", _schemas, _schemas_arguments),
)
