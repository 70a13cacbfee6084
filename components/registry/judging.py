"""What the gate needs, brought together: a candidate's results, those of other methods, and the champion's.

The champion is compared on the candidate's own test questions where its run has the champion's answers to them
(`candidate.note_champion`), else by the results that the champion was registered with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from components.config import RunConfig
from components.config_gate import CHAMPION, GateConfig
from components.errors import UsageError
from components.registry.candidate import RUN_FILE, Candidate, noted_champion, read_results
from components.registry.gate import Evaluated, judge
from components.registry.registry import RESULTS_FOLDER, Registry, Version
from components.registry.verdict import Verdict
from components.run_file import load_run_file


def judge_version(registry: Registry, version: Version, gate: GateConfig | None = None) -> Verdict:
    """The gate's verdict on a registered version against the champion there is now.

    Args:
        registry: The registry.
        version: The candidate.
        gate: Rules; by default those of the run file that the version was registered with.

    Raises:
        UsageError: Neither has rules.
        RegistryError: Files of the version or of the champion are missing.
    """
    with registry.files(version) as folder:
        config = load_run_file(folder / RUN_FILE)
        rules = _rules(gate or config.gate, version.name)
        results = folder / RESULTS_FOLDER
        splits = _splits(config)
        candidate = read_results(results / version.method, version.name, splits, version.number)
        references = _others(rules, lambda name: results / name, splits)
        references[CHAMPION] = _champion(registry, version.model, results, results / CHAMPION, splits)
        return judge(rules, candidate, references, config.evaluation, config.seed)


def judge_run(registry: Registry | None, model: str, candidate: Candidate, gate: GateConfig | None = None) -> Verdict:
    """The gate's verdict on a method of a run folder, registered or not.

    Args:
        registry: The registry; None leaves it out, which suits rules that do not speak of the champion.
        model: The registered model whose champion is challenged.
        candidate: The method.
        gate: Rules; by default those of the run file.

    Raises:
        UsageError: There are no rules, or they speak of the champion and no registry is given.
        RegistryError: Files of the champion are missing.
    """
    rules = _rules(gate or candidate.config.gate, str(candidate.folder))
    splits = candidate.test_splits
    references = _others(rules, lambda name: candidate.folder / name / RESULTS_FOLDER, splits)
    if any(rule.reference == CHAMPION for rule in rules.rules):
        if registry is None:
            raise UsageError("the gate compares with the champion, but no registry is known: tracking is off")
        here = candidate.folder / CHAMPION / RESULTS_FOLDER
        references[CHAMPION] = _champion(registry, model, candidate.folder, here, splits)
    return judge(
        rules, candidate.results(candidate.method), references, candidate.config.evaluation, candidate.config.seed
    )


def _rules(gate: GateConfig | None, whose: str) -> GateConfig:
    if gate is None:
        raise UsageError(f"{whose}: its run file has no section 'gate'; name a run file that has one with --config")
    return gate


def _splits(config: RunConfig) -> list[str]:
    return ["id", *config.data.ood]


def _others(gate: GateConfig, place: Callable[[str], Path], splits: list[str]) -> dict[str, Evaluated | None]:
    """Results of the other methods that rules name, as far as there are any."""
    names = {rule.reference for rule in gate.rules if rule.reference not in (None, CHAMPION)}
    return {str(name): read_results(place(str(name)), str(name), splits) for name in names if place(str(name)).is_dir()}


def _champion(registry: Registry, model: str, noted: Path, results: Path, splits: list[str]) -> Evaluated | None:
    champion = registry.champion(model)
    if champion is None:
        return None
    name = f"champion (version {champion.number})"
    if noted_champion(noted, model) == champion.number:
        return read_results(results, name, splits, champion.number)
    own = registry.results(champion, splits)
    return Evaluated(name, own.metrics, own.predictions, champion.number)
