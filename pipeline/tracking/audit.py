"""Who moved which alias when, and why. MLflow keeps no history of its aliases, so every change is written down beside the model itself:
one tag of the registered model for each change, numbered, begun before the aliases move and marked done after. A change that was cut short stays
visible as such. release/log.jsonl repeats the done ones in the checkout that made them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.paths import Paths

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG_PREFIX = "bevj6.change."
MAX_REASON = 1000  # MLflow's limit for the tag is 5000 characters


@dataclass(frozen=True)
class AliasChange:
    """One change of the champion. `replaced`: the version that was champion before, None at first. `overruled`: what spoke against it when forced."""

    action: str
    model: str
    version: int
    replaced: int | None
    gate: str
    reason: str | None
    by: str
    at: str
    number: int = 0
    overruled: tuple[str, ...] = field(default=())
    done: bool = False

    @property
    def before(self) -> str:
        """The champion until then, in words."""
        return "the first" if self.replaced is None else f"was {self.replaced}"

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and the log."""
        return asdict(self)


def history(client: MlflowClient, model: str) -> list[AliasChange]:
    """All changes of a registered model, oldest first. Their order is their number: clocks of different machines need not agree."""
    tags = client.get_registered_model(model).tags
    entries = [json.loads(value) for name, value in sorted(tags.items()) if name.startswith(TAG_PREFIX)]
    return [AliasChange(**{**entry, "overruled": tuple(entry["overruled"])}) for entry in entries]


def begin(client: MlflowClient, change: AliasChange) -> AliasChange:
    """Write a change down before it is made. Returns it with its number."""
    earlier = history(client, change.model)
    numbered = replace(change, number=earlier[-1].number + 1 if earlier else 1, reason=change.reason and change.reason[:MAX_REASON])
    _write(client, numbered)
    return numbered


def finish(client: MlflowClient, paths: Paths, change: AliasChange) -> AliasChange:
    """Mark a change as done, and repeat it in the checkout's log."""
    done = replace(change, done=True)
    _write(client, done)
    paths.release_dir.mkdir(exist_ok=True)
    with (paths.release_dir / "log.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(done.as_dict(), sort_keys=True) + "\n")
    return done


def withdraw(client: MlflowClient, change: AliasChange) -> None:
    """Take back what `begin` wrote, for a change that did not happen."""
    client.delete_registered_model_tag(change.model, _tag(change))


def read_log(paths: Paths) -> list[dict[str, Any]]:
    """Entries of the checkout's log, oldest first; empty where there is none yet."""
    log = paths.release_dir / "log.jsonl"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def _write(client: MlflowClient, change: AliasChange) -> None:
    client.set_registered_model_tag(change.model, _tag(change), json.dumps(change.as_dict(), sort_keys=True))


def _tag(change: AliasChange) -> str:
    return f"{TAG_PREFIX}{change.number:06d}"
