"""The order of commands in the stored histories, in words: `python -m tests.replay.command_order` writes it down.

A run in progress goes on under a new version only if that issues the same commands in the same order. The replay of
the stored histories notices a change of the code. That somebody recorded the histories again after such a change is
noticed here: `command_order.txt` no longer says what they say, and its digests are no longer in the CHANGELOG.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.replay.record import HISTORIES

FILE: Final = Path(__file__).parent / "command_order.txt"
CHANGELOG: Final = Path(__file__).parents[2] / "CHANGELOG.md"
DIGITS: Final = 12

Attributes = Mapping[str, Any]


def _queue(of: Attributes) -> str:
    name = str(of["taskQueue"]["name"])
    # Pools and queues of tests have random names.
    return name.partition("-")[0] + ("-*" if "-" in name else "")


def _names(of: Attributes, field: str, inner: str) -> str:
    return ",".join(sorted(of.get(field, {}).get(inner, {})))


COMMANDS: Final[Mapping[str, Callable[[Attributes], str]]] = {
    "ActivityTaskScheduled": lambda of: f"activity {of['activityType']['name']} on {_queue(of)}",
    "ActivityTaskCancelRequested": lambda of: "cancel activity",
    "TimerStarted": lambda of: "timer",
    "TimerCanceled": lambda of: "cancel timer",
    "UpsertWorkflowSearchAttributes": lambda of: f"attributes {_names(of, 'searchAttributes', 'indexedFields')}",
    "WorkflowPropertiesModified": lambda of: f"memo {_names(of, 'upsertedMemo', 'fields')}",
    "StartChildWorkflowExecutionInitiated": lambda of: f"child {of['workflowType']['name']} on {_queue(of)}",
    "SignalExternalWorkflowExecutionInitiated": lambda of: f"signal {of['signalName']}",
    "MarkerRecorded": lambda of: f"marker {of['markerName']}",
    "WorkflowExecutionUpdateAccepted": lambda of: "accept update",
    "WorkflowExecutionUpdateCompleted": lambda of: "complete update",
    "WorkflowExecutionContinuedAsNew": lambda of: "continue as new",
    "WorkflowExecutionCompleted": lambda of: "complete",
    "WorkflowExecutionFailed": lambda of: "fail",
    "WorkflowExecutionCanceled": lambda of: "close canceled",
}
"""Events that a command of the workflow leaves, in words."""


def _name(event: Attributes) -> str:
    """`EVENT_TYPE_TIMER_STARTED`, as it is stored, is `TimerStarted`."""
    return "".join(word.capitalize() for word in str(event["eventType"]).removeprefix("EVENT_TYPE_").split("_"))


def commands(history: str) -> tuple[str, tuple[str, ...]]:
    """Workflow type and commands of a history."""
    events = json.loads(history)["events"]
    kind = str(events[0]["workflowExecutionStartedEventAttributes"]["workflowType"]["name"])
    issued = []
    for event in events:
        if (name := _name(event)) in COMMANDS:
            attributes = event.get(f"{name[0].lower()}{name[1:]}EventAttributes", {})
            issued.append(COMMANDS[name](attributes))
    return kind, tuple(issued)


def _lines() -> Iterator[tuple[str, str]]:
    """Workflow type and line of every history: equal commands in a row are counted."""
    for file in sorted(HISTORIES.glob("*.json")):
        kind, issued = commands(file.read_text())
        yield kind, f"{file.stem}: {'; '.join(_counted(issued))}"


def _counted(issued: tuple[str, ...]) -> Iterator[str]:
    previous, count = "", 0
    for command in (*issued, ""):
        if command == previous:
            count += 1
            continue
        if previous:
            yield previous if count == 1 else f"{count} x {previous}"
        previous, count = command, 1


def written() -> str:
    """What belongs into `command_order.txt`."""
    return "\n".join(line for _, line in _lines()) + "\n"


def digests() -> dict[str, str]:
    """Digest of the lines of each workflow type."""
    lines = defaultdict(list)
    for kind, line in _lines():
        lines[kind].append(line)
    return {kind: hashlib.sha256("\n".join(own).encode()).hexdigest()[:DIGITS] for kind, own in sorted(lines.items())}


def main() -> None:
    """Write the file, and say what belongs into the CHANGELOG."""
    FILE.write_text(written())
    for kind, digest in digests().items():
        print(f"- `{kind}` `{digest}`: ")  # noqa: T201


if __name__ == "__main__":
    main()
