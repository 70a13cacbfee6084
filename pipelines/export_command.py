"""`caltune export`: a trained adapter in forms that other programs read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.options import Json

Adapter = Annotated[Path, typer.Argument(help="Adapter folder.", show_default=False)]
Out = Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)]
Evaluation = Annotated[
    Path | None,
    typer.Option(
        help="Folder of <split>/metrics.json for the card; by default 'evaluation' beside the adapter.",
        show_default=False,
    ),
]


def add_export_command(app: typer.Typer) -> None:
    """Puts the command group into `app`."""
    group = typer.Typer(no_args_is_help=True, help="Write an adapter in a form that other programs read.")
    group.command("merged")(merged)
    group.command("mixlora")(mixlora)
    group.command("push")(push)
    app.add_typer(group, name="export")


def merged(
    adapter: Adapter,
    out: Out,
    fold: Annotated[
        bool, typer.Option("--fold", help="Fold the calibration head into the output layer, where that is exact.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="Where the base model is, if not where the adapter says.", show_default=False),
    ] = None,
    evaluation: Evaluation = None,
    json_: Json = False,
) -> None:
    """Merge a LoRA adapter into a plain Hugging Face model.

    A calibration head goes beside it, with logits processors for transformers and vLLM; with --fold it goes into the
    output layer. The outcome is compared with the adapter on real questions before it is put in place.
    """
    from components.export.card import evaluation_of, measured
    from components.export.merged import export_merged
    from components.export.source import open_source

    figures = evaluation_of(adapter, evaluation)
    results = "" if figures is None else measured(figures)
    made = export_merged(open_source(adapter, base_model), out, fold=fold, results=results)
    if json_:
        print(json.dumps(asdict(made) | {"folder": str(made.folder)}, indent=2))
        return
    print(f"{made.folder}: {made.dtype}, within {made.merging.greatest:.1e} of the adapter's log-probabilities")
    if made.folding is not None:
        print(f"calibration head folded into the output layer, within {made.folding.greatest:.1e}")
    if made.alpha == "beside":
        print("the calibration head lies beside the model: use calibrated_logits.py, as the README.md there says")


def mixlora(adapter: Adapter, out: Out) -> None:
    """Write a mixture of LoRA experts in the public MixLoRA format, which the package mixlora reads."""
    from components.models.mixlora.public_format import export_public

    print(export_public(adapter, out))


def push(
    folder: Annotated[Path, typer.Argument(help="Adapter folder, or a merged model.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(help="Repository on the hub: owner/name.", show_default=False)],
    evaluation: Evaluation = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload to a hub repository, with the measured calibration in the model card. HF_TOKEN must allow writing."""
    from components.export.push import push as upload

    print(upload(folder, repo_id, evaluation=evaluation, private=private))
