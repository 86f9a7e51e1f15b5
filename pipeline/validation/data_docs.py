"""The rules as Great Expectations suites, and their result as static HTML (reports/data_docs).

One suite a tidy table, one expectation a rule. The verdicts are those of `evaluate` (a test compares them); this page is for people. Failures
carry the tokens of their rows. Great Expectations takes seconds to import, so it is imported inside the function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.io import atomic_dir
from pipeline.validation.evaluate import Outcome, TidyTables
from pipeline.validation.report import findings_csv
from pipeline.validation.rules import Rule

_SEVERITY = {"error": "critical", "warning": "warning"}
# Equal data must give equal bytes: runs are stamped with the data's fingerprint, not with the time of day.
_RUN_TIME = datetime(2000, 1, 1, tzinfo=UTC)
_SHOWN_FAILURES = 20
_LISTED_FAILURES = 1000


def write_data_docs(outcomes: Sequence[Outcome], tables: TidyTables, directory: Path, fingerprint: str) -> dict[str, int]:
    """Check the tidy tables with Great Expectations and write its pages and findings.csv.

    Args:
        outcomes: the rules; their own results only fill findings.csv.
        tables: tidy tables by name.
        directory: replaced as a whole.
        fingerprint: names the run on the pages.

    Returns:
        Number of failing rows by rule name, as Great Expectations counts them.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx

    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source = context.data_sources.add_pandas("data set")
    failed: dict[str, int] = {}
    with atomic_dir(directory) as temporary:
        context.add_data_docs_site("local", _site(temporary))
        for name in dict.fromkeys(outcome.rule.table for outcome in outcomes):
            of_table = [outcome for outcome in outcomes if outcome.rule.table == name]
            if tables[name].num_rows:
                failed.update(_check_table(context, source, of_table, tables[name], fingerprint))
        context.build_data_docs(site_names=["local"])
        for page in temporary.rglob("*.html"):
            page.write_text(_reproducible(page.read_text(encoding="utf-8"), depth=len(page.relative_to(temporary).parts) - 1), encoding="utf-8")
        (temporary / "findings.csv").write_text(findings_csv(outcomes), encoding="utf-8")
    return failed


def _site(directory: Path) -> dict[str, Any]:
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(directory)}
    return {"class_name": "SiteBuilder", "store_backend": store, "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"}}


def _check_table(context: Any, source: Any, outcomes: Sequence[Outcome], table: pa.Table, fingerprint: str) -> dict[str, int]:
    """Run one table's suite as a checkpoint of the context."""
    import great_expectations as gx
    from great_expectations.core.run_identifier import RunIdentifier

    rules = [outcome.rule for outcome in outcomes]
    name = rules[0].table
    batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all rows")
    suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=[expectation(rule) for rule in rules]))
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
    result_format = {
        # Only the complete format lists the tokens of failing rows; with very many of them a page would not load.
        "result_format": "COMPLETE" if max(len(outcome.tokens) for outcome in outcomes) <= _LISTED_FAILURES else "SUMMARY",
        "unexpected_index_column_names": ["token"],
        "partial_unexpected_count": _SHOWN_FAILURES,
    }
    checkpoint = context.checkpoints.add(gx.Checkpoint(name=name, validation_definitions=[definition], actions=[], result_format=result_format))
    frame = table.select(["token", *dict.fromkeys(rule.column for rule in rules)]).to_pandas()
    run = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=RunIdentifier(run_name=fingerprint[:12], run_time=_RUN_TIME))
    (results,) = run.run_results.values()
    return {result.expectation_config.meta["rule"]: result.result["unexpected_count"] for result in results.results}


def expectation(rule: Rule) -> Any:
    """The expectation of one rule."""
    import great_expectations.expectations as gxe

    common: dict[str, Any] = {
        "column": rule.column,
        "severity": _SEVERITY[rule.severity],
        "description": f"{rule.name}: {rule.meaning} ({rule.column} {rule.limit})",
        "meta": {"rule": rule.name},
    }
    if rule.is_text:
        return gxe.ExpectColumnValuesToBeInSet(value_set=[""], **common)
    return gxe.ExpectColumnValuesToBeBetween(min_value=rule.minimum, max_value=rule.maximum, **common)


def _reproducible(html: str, depth: int) -> str:
    """Take time stamps and random element ids out of a page, and its logo from the local copy instead of a remote server."""
    html = re.sub(r"https://[\w.-]+/logo-long\.png\?d=[\dTZ.]+", "../" * depth + "static/images/logo-long.png", html)
    html = re.sub(r"\b20\d{6}T\d{6}\.\d{6}Z\b", _RUN_TIME.strftime("%Y%m%dT%H%M%S.%fZ"), html)
    numbers: dict[str, str] = {}
    return re.sub(
        r"(?<=collapse-body-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        lambda match: numbers.setdefault(match.group(), str(len(numbers))),
        html,
    )
