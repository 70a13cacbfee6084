"""From run file to split files on disk, and back with their hashes checked."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from components.config import RunConfig
from components.config_data import DataConfig, SourceConfig
from components.data.files import read_open_questions, read_questions
from components.data.rows import make_set
from components.data.sampling import draw
from components.data.schema import AnyQuestion, QuestionSet
from components.data.sources import load_source
from components.data.splits import Overlap, divide, entity_of, find_overlaps
from components.errors import DataError

MANIFEST = "manifest.json"
IN_DOMAIN = "id"
RESERVED = ("train", "calibration", "validation", "validation_shift", IN_DOMAIN)


@dataclass(frozen=True)
class PreparedData:
    """The splits of a run.

    Attributes:
        splits: By name, in this order: `train`, `calibration`, `validation`, `validation_shift` where groups are held
            out, `id` (in-domain test), then the out-of-domain sets under their names.
        overlaps: Questions that stand in two splits, as found before any were dropped.
        manifest: What `manifest.json` holds.
    """

    splits: Mapping[str, QuestionSet]
    overlaps: tuple[Overlap, ...]
    manifest: Mapping[str, object]


def prepare(config: RunConfig, folder: Path, base_folder: Path) -> PreparedData:
    """Read the sources, divide them, look for overlaps, and write `<split>.jsonl` files and a manifest.

    Separate test sets are cut to `splits.test` questions by the run's seed, after leaving out questions about
    entities that another split uses.

    Args:
        config: The run.
        folder: Where to write; made if missing. The manifest is written last.
        base_folder: Where relative paths of sources start.

    Raises:
        DataError: A source is wrong, there are too few questions, or splits overlap and `data.overlap` is `error`.
    """
    splits, left_out = _read_splits(config, base_folder)
    overlaps = tuple(find_overlaps(splits))
    splits, dropped = _apply_policy(splits, overlaps, config.data)
    manifest: dict[str, object] = {
        "seed": config.seed,
        "splits": {name: _describe(split) for name, split in splits.items()},
        "overlap_policy": config.data.overlap,
        "overlaps": [asdict(overlap) for overlap in overlaps],
        "dropped": dropped,
        "left_out_by_entity": left_out,
    }
    # Through JSON at once, so that what is returned equals what is loaded later.
    text = json.dumps(manifest, ensure_ascii=False, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        rows = (json.dumps(question.as_row(), ensure_ascii=False) + "\n" for question in split)
        _write_atomically(folder / f"{name}.jsonl", "".join(rows))
    _write_atomically(folder / MANIFEST, text + "\n")
    return PreparedData(splits, overlaps, json.loads(text))


def load_prepared(folder: Path) -> PreparedData:
    """Read what `prepare` wrote.

    Raises:
        DataError: Something is missing, malformed, or not what the manifest's hashes say.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        described = dict(manifest["splits"])
        overlaps = tuple(
            Overlap(**{**entry, "pairs": tuple(map(tuple, entry["pairs"]))}) for entry in manifest["overlaps"]
        )
        splits = {name: _load_split(folder, name, entry) for name, entry in described.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(path, None, None, f"cannot be read: {error!r}", "prepare the data again") from error
    return PreparedData(splits, overlaps, manifest)


def _read_splits(config: RunConfig, base_folder: Path) -> tuple[dict[str, QuestionSet], dict[str, int]]:
    data = config.data
    source = load_source(data.source, config.seed, "source", base_folder)
    parts = divide(source, data.splits, data.heldout_groups, config.seed, with_test=data.test_source is None)
    splits: dict[str, QuestionSet] = {name: parts[name] for name in parts if name != "test"}
    used = {entity_of(question) for split in splits.values() for question in split if question.entity is not None}
    left_out: dict[str, int] = {}
    if data.test_source is None:
        splits[IN_DOMAIN] = make_set(IN_DOMAIN, parts["test"], source.source)
    else:
        splits[IN_DOMAIN], left_out[IN_DOMAIN] = _test_set(data.test_source, IN_DOMAIN, used, config, base_folder)
    for name, test_source in data.ood.items():
        if name in RESERVED or not name.replace("-", "").replace("_", "").isalnum():
            raise DataError(
                "run file",
                None,
                f"data.ood.{name}",
                "is no possible name",
                "letters, digits, - and _; not the name of another split",
            )
        splits[name], left_out[name] = _test_set(test_source, name, used, config, base_folder)
    return splits, left_out


def _test_set(
    source: SourceConfig, name: str, used: set[str], config: RunConfig, base_folder: Path
) -> tuple[QuestionSet, int]:
    """The set, and how many questions were left out because another split uses their entity."""
    whole = load_source(source, config.seed, name, base_folder)
    free = [question for question in whole if question.entity not in used]
    if not free:
        raise DataError(
            whole.source,
            None,
            f"data.ood.{name}" if name != IN_DOMAIN else "data.test_source",
            f"all {len(whole)} questions are about entities that train, calibration or validation use",
            "set data.splits.train to leave some, or take another source",
        )
    return make_set(name, draw(free, config.data.splits.test, config.seed), whole.source), len(whole) - len(free)


def _apply_policy(
    splits: Mapping[str, QuestionSet], overlaps: tuple[Overlap, ...], data: DataConfig
) -> tuple[dict[str, QuestionSet], dict[str, int]]:
    """Splits after the overlap policy, and how many rows each lost."""
    if not overlaps or data.overlap == "report":
        return dict(splits), {}
    if data.overlap == "error":
        found = "; ".join(
            f"{each.first} and {each.second} share {each.questions} question texts, {each.same_choices} with the same "
            "choices"
            for each in overlaps
        )
        raise DataError(
            data.source.path or data.source.kind, None, "data.overlap", found, "or set it to drop or report"
        )
    result = dict(splits)
    dropped: dict[str, int] = {}
    for name, split in splits.items():
        gone = {id_ for overlap in overlaps if overlap.first == name for id_, _ in overlap.pairs}
        if gone:
            kept = [question for question in split if question.id not in gone]
            result[name] = make_set(name, kept, split.source)
            dropped[name] = len(split) - len(kept)
    return result, dropped


def _describe(split: QuestionSet) -> dict[str, object]:
    return {
        "n": len(split),
        "hash": split.content_hash,
        "groups": dict(Counter(question.group for question in split if question.group is not None)),
        "oddities": dict(split.oddities),
        "source": split.source,
        **({"rows": "open"} if split.open_ended else {}),
    }


def _load_split(folder: Path, name: str, entry: Mapping[str, object]) -> QuestionSet:
    path = folder / f"{name}.jsonl"
    questions: tuple[AnyQuestion, ...] = ()
    if entry["n"]:
        is_open = entry.get("rows") == "open"
        questions = read_open_questions(path, None, name) if is_open else read_questions(path, None, name).questions
    split = make_set(name, questions, str(entry["source"]))
    if split.content_hash != entry["hash"]:
        raise DataError(path, None, None, "is not what the manifest describes", "prepare the data again")
    return split


def _write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
