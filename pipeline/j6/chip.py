"""Chip profiles: every number of the hardware model with its unit, source and confidence.

A profile is a YAML file with `name`, `march`, `provenance` and `quantities`; each quantity is {value, unit, source, confidence}. A number nobody
published stays null and is refused where it is needed. `base` names a profile whose quantities the file inherits, so a user's own chip or a
changed number is a file of a few lines. The rates that no document gives are fitted and shared by all chips (`fitted_rates.yaml`); what
differs between chips is their documented size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ChipError
from pipeline.io import canonical_hash

CHIP_DIR = Path(__file__).parent / "chips"
FITTED_RATES = "fitted_rates"
CONFIDENCES = ("official", "vendor", "community", "derived", "assumed", "fitted")
QUANTITY_KEYS = frozenset({"value", "unit", "source", "confidence"})
PROFILE_KEYS = frozenset({"name", "march", "provenance", "base", "quantities"})

Value = float | int | bool | str | None

MAY_BE_ZERO = frozenset(  # memories that a chip may lack, and overheads
    {"l1m_bytes", "l2m_bytes", "weight_buffer_bytes", "launch_us_tops", "host_us_ghz", "host_us_ghz_per_mb", "contention_us", "segment_us_ghz"}
)


@dataclass(frozen=True)
class Quantity:
    """One number of the model and where it comes from."""

    value: Value
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class ChipProfile:
    """A chip: name, architecture (`march`), and all quantities including the fitted rates."""

    name: str
    march: str
    provenance: str
    quantities: Mapping[str, Quantity]

    @cached_property
    def hash(self) -> str:
        """sha256 over names and values; called `profile_hash` wherever a simulated figure is printed."""
        values = {key: quantity.value for key, quantity in self.quantities.items()}
        return canonical_hash({"name": self.name, "march": self.march, "values": values})

    def value(self, key: str) -> Value:
        """The raw value, None when unknown. Raises `ChipError` for a key that no profile has."""
        if key not in self.quantities:
            raise ChipError(f"chip {self.name}: no quantity {key!r}; known: {', '.join(sorted(self.quantities))}")
        return self.quantities[key].value

    def number(self, key: str) -> float:
        """A number that the caller cannot do without.

        Raises `ChipError` when it is null, no number, or outside its range: above 0, or 0 for `MAY_BE_ZERO`.
        """
        value = self.value(key)
        if value is None:
            source = self.quantities[key].source
            raise ChipError(
                f"chip {self.name}: {key} is unknown ({source}); give it in a profile of your own (base: {self.name}) or with --set {key}=VALUE"
            )
        if isinstance(value, (bool, str)):
            raise ChipError(f"chip {self.name}: {key} is {value!r}, a number is needed")
        if not (isfinite(value) and (value > 0 or (value == 0 and key in MAY_BE_ZERO))):
            raise ChipError(f"chip {self.name}: {key} is {value:g}, a finite number {'>= 0' if key in MAY_BE_ZERO else '> 0'} is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        """A yes/no property; null counts as no."""
        return bool(self.value(key))


def known_chips() -> tuple[str, ...]:
    """Names of the profiles that ship with the project."""
    return tuple(sorted(path.stem for path in CHIP_DIR.glob("*.yaml") if path.stem != FITTED_RATES))


def load_chip(name_or_path: str | Path, overrides: Mapping[str, Value] | None = None, rates: Path | None = None) -> ChipProfile:
    """Load a profile by name ("j6m") or path, apply `overrides` (key -> value), add the fitted rates (`rates`: a file of `fit` instead of ours).

    Raises `ChipError` for an unknown name, a malformed file or an override of a key that does not exist.
    """
    path = _profile_path(name_or_path)
    quantities = _read_quantities(rates or CHIP_DIR / f"{FITTED_RATES}.yaml") | _inherited(path)
    for key, value in (overrides or {}).items():
        if key not in quantities:
            raise ChipError(f"{path}: override of {key!r}, which no profile has; known: {', '.join(sorted(quantities))}")
        quantities[key] = Quantity(value, quantities[key].unit, "override by the user", "assumed")
    content = _read_yaml(path)
    return ChipProfile(str(content["name"]), str(content["march"]), str(content.get("provenance", "")), quantities)


def _profile_path(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text in known_chips():
        return CHIP_DIR / f"{text}.yaml"
    path = Path(text)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    raise ChipError(f"chip {text!r} is unknown; known: {', '.join(known_chips())}, or the path of a profile (.yaml)")


def _inherited(path: Path, depth: int = 0) -> dict[str, Quantity]:
    """Quantities of a profile on top of those of its base."""
    base = _read_yaml(path).get("base")
    if depth > len(known_chips()):
        raise ChipError(f"{path}: base profiles form a circle")
    return (_inherited(_profile_path(base), depth + 1) if base else {}) | _read_quantities(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ChipError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(content, dict):
        raise ChipError(f"{path}: a chip profile is a mapping with name, march and quantities")
    unknown = sorted(set(content) - PROFILE_KEYS)
    missing = sorted({"name", "march"} - set(content))
    if unknown or missing:
        raise ChipError(f"{path}: {f'unknown key {unknown[0]!r}' if unknown else f'key {missing[0]!r} is missing'}")
    return content


def _read_quantities(path: Path) -> dict[str, Quantity]:
    entries = _read_yaml(path).get("quantities") or {}
    return {key: _quantity(path, key, entry) for key, entry in entries.items()}


def _quantity(path: Path, key: str, entry: Any) -> Quantity:
    if not isinstance(entry, dict) or set(entry) != QUANTITY_KEYS:
        raise ChipError(f"{path}: quantity {key!r} needs exactly the keys {', '.join(sorted(QUANTITY_KEYS))}")
    if entry["confidence"] not in CONFIDENCES:
        raise ChipError(f"{path}: quantity {key!r} has confidence {entry['confidence']!r}; it must be one of {', '.join(CONFIDENCES)}")
    if entry["value"] is not None and not isinstance(entry["value"], (int, float, str, bool)):
        raise ChipError(f"{path}: quantity {key!r} has value {entry['value']!r}; it must be a number, text, true/false or null")
    return Quantity(entry["value"], str(entry["unit"]), str(entry["source"]), entry["confidence"])
